"""What docs/clients.md promises: inputs, outputs, sampling parameters. Errors are in `test_bad_requests`, the
life cycle in `test_lifecycle`, `test_cancellation` and `test_supervision`, metrics in `test_metrics`."""

from __future__ import annotations

import json
import math

import pytest

from dflash_backend.config import SETTINGS, asset_path
from dflash_backend.text.tokenizer import Tokenizer
from tests.server.raw_grpc import infer, inputs_of, text_of

PROMPT = "Write a short list of things to pack."
GREEDY = {"temperature": "0", "max_tokens": "24", "ignore_eos": "true"}
SAMPLED = {"temperature": "1", "seed": "11", "max_tokens": "24", "ignore_eos": "true"}
FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "logprobs", "cumulative_logprob")
ALL_FLAGS = {f"return_{name}": True for name in (*FLAGS, "spec_stats")}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(asset_path("demo", "pair", "target"))


@pytest.fixture
def ask(server):
    """One answer over gRPC: its outputs by name, as lists."""

    def ask(parameters=None, **inputs):
        sent = inputs_of(**{"text_input": PROMPT, "exclude_input_in_output": True, **inputs})
        (result,), error = infer(server.grpc_url, sent, parameters)
        assert error is None
        return {output.name: result.as_numpy(output.name).tolist() for output in result.get_response().outputs}

    return ask


def ids_of(ask, parameters, **inputs):
    return ask(parameters, return_token_ids=True, **inputs)["token_ids"]


# Inputs


def test_text_input_and_input_ids_and_http_give_the_same_answer(ask, post, tokenizer):
    by_text = ask(GREEDY)["text_output"]
    by_ids = ask(GREEDY, text_input=None, input_ids=tokenizer.encode(PROMPT))["text_output"]
    body = post(text_input=PROMPT, exclude_input_in_output=True, **GREEDY).json()
    assert by_text == by_ids == [body["text_output"].encode()]


def test_input_ids_that_are_not_excluded_come_back_as_their_text(ask, tokenizer):
    answer = ask(GREEDY, text_input=None, input_ids=tokenizer.encode(PROMPT), exclude_input_in_output=False)
    assert answer["text_output"][0].decode() == PROMPT + ask(GREEDY)["text_output"][0].decode()


def test_messages_are_the_chat_template_of_the_tokenizer(ask, tokenizer):
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    by_ids = ids_of(ask, GREEDY, text_input=None, input_ids=tokenizer.apply_chat_template(messages))
    assert ids_of(ask, GREEDY, text_input=None, messages=json.dumps(messages)) == by_ids


def test_stream_defaults_to_one_response(server):
    results, _ = infer(server.grpc_url, inputs_of(text_input=PROMPT), GREEDY)
    assert len(results) == 1


def test_the_sampling_parameters_input_wins_over_the_requests_parameters(ask):
    outputs = ask(
        {"max_tokens": "3", "nonsense": "1"},
        sampling_parameters=json.dumps({**GREEDY, "max_tokens": 7}),
        return_num_output_tokens=True,
    )
    assert outputs["num_output_tokens"] == [7]


def test_request_parameters_may_be_numbers_and_booleans_too(ask):
    assert ids_of(ask, {"temperature": "0", "max_tokens": 24, "ignore_eos": True}) == ids_of(ask, GREEDY)


def test_http_takes_parameters_at_the_top_level_as_numbers_and_as_texts(post):
    texts = [
        post(text_input=PROMPT, temperature=0, max_tokens=9, stop="zzz").json()["text_output"],
        post(text_input=PROMPT, temperature="0", max_tokens="9", stop='["zzz", "yyy"]').json()["text_output"],
        post(text_input=PROMPT, sampling_parameters='{"temperature": 0, "max_tokens": 9}').json()["text_output"],
    ]
    assert len(set(texts)) == 1


def test_names_that_begin_with_triton_are_skipped(post):
    assert post(text_input=PROMPT, max_tokens=1, triton_anything=5).status_code == 200


# Outputs


def test_only_text_output_comes_unasked(ask):
    assert set(ask(GREEDY)) == {"text_output"}


@pytest.mark.parametrize("name", [*FLAGS, "spec_stats", "steps"])
def test_each_output_comes_when_asked_for_and_alone(ask, name):
    assert set(ask({**GREEDY, "logprobs": "1"}, **{f"return_{name}": True})) == {"text_output", name}


def test_outputs_have_the_types_of_the_contract(server):
    (result,), _ = infer(server.grpc_url, inputs_of(text_input=PROMPT, **ALL_FLAGS), {**GREEDY, "logprobs": "1"})
    types = {output.name: output.datatype for output in result.get_response().outputs}
    assert types == {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        "cumulative_logprob": "FP32",
        "logprobs": "BYTES",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32",
        "token_ids": "INT32",
        "spec_stats": "BYTES",
    }


def test_deltas_carry_what_is_new_and_the_last_one_the_statistics(server, ask, tokenizer):
    whole = ask({**GREEDY, "logprobs": "1"}, **ALL_FLAGS)
    inputs = inputs_of(text_input=PROMPT, stream=True, **ALL_FLAGS)
    results, _ = infer(server.grpc_url, inputs, {**GREEDY, "logprobs": "1"})
    assert text_of(results).encode() == whole["text_output"][0]
    assert [i for result in results for i in result.as_numpy("token_ids").tolist()] == whole["token_ids"]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 24
    assert [result.as_numpy("finish_reason")[0] for result in results] == [b"None"] * (len(results) - 1) + [b"length"]
    assert [entry for result in results for entry in json.loads(result.as_numpy("logprobs")[0])] == json.loads(
        whole["logprobs"][0]
    )
    assert {int(result.as_numpy("num_input_tokens")[0]) for result in results} == {len(tokenizer.encode(PROMPT))}
    assert [result.as_numpy("spec_stats") is not None for result in results] == [False] * (len(results) - 1) + [True]
    assert len(results) < 24, "a response carries all tokens of its step"


def test_spec_stats_say_what_speculation_and_the_prefix_cache_did(ask):
    ask(GREEDY)
    stats = json.loads(ask(GREEDY, return_spec_stats=True)["spec_stats"][0])
    assert set(stats) == {
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "acceptance_length",
        "num_cached_tokens",
        "num_preemptions",
        "queue_time_s",
    }
    assert len(stats["num_accepted_tokens_per_pos"]) == 15
    assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"] > 0
    expected = 1 + stats["num_accepted_tokens"] / stats["num_drafts"]
    assert math.isclose(stats["acceptance_length"], expected, abs_tol=1e-4)


def test_logprobs_of_accepted_drafts_are_as_without_drafts(ask):
    answers = [
        ask({**GREEDY, "logprobs": "2", "num_speculative_tokens": k}, return_logprobs=True, return_spec_stats=True)
        for k in ("15", "0")
    ]
    assert json.loads(answers[0]["spec_stats"][0])["num_accepted_tokens"] > 0
    drafted, plain = (json.loads(answer["logprobs"][0]) for answer in answers)
    assert len(drafted) == len(plain) == 24
    for one, other in zip(drafted, plain, strict=True):
        assert next(iter(one)) == next(iter(other))
        assert [entry["rank"] for entry in one.values()] == [1, 2] or len(one) == 3
        for token_id in set(one) & set(other):
            assert math.isclose(one[token_id]["logprob"], other[token_id]["logprob"], abs_tol=1e-3)


def test_cumulative_logprob_is_the_sum_and_needs_no_parameter(ask):
    asked = {"return_logprobs": True, "return_cumulative_logprob": True}
    with_parameter = ask({**SAMPLED, "logprobs": "0"}, **asked)
    total = sum(entry["logprob"] for token in json.loads(with_parameter["logprobs"][0]) for entry in token.values())
    assert math.isclose(with_parameter["cumulative_logprob"][0], total, rel_tol=1e-4)
    without = ask(SAMPLED, **asked)
    assert without["logprobs"] == [b"null"]
    assert math.isclose(without["cumulative_logprob"][0], total, rel_tol=1e-4)


# Sampling parameters


def test_max_tokens_defaults_to_16(ask):
    outputs = ask({"temperature": "0", "ignore_eos": "true"}, return_num_output_tokens=True, return_finish_reason=True)
    assert (outputs["num_output_tokens"], outputs["finish_reason"]) == ([16], [b"length"])


def test_seed_repeats_an_answer_and_another_seed_does_not(ask):
    first, again = ids_of(ask, SAMPLED), ids_of(ask, SAMPLED)
    assert first == again != ids_of(ask, {**SAMPLED, "seed": "12"})


def test_n_has_the_seeds_that_follow_each_other(ask):
    outputs = ask({**SAMPLED, "n": "3"}, return_token_ids=True, return_num_output_tokens=True)
    assert outputs["num_output_tokens"] == [24, 24, 24]
    alone = [ids_of(ask, {**SAMPLED, "seed": seed}) for seed in ("11", "12", "13")]
    assert outputs["token_ids"] == [token_id for ids in alone for token_id in ids]


@pytest.mark.parametrize("narrow", [{"top_k": "1"}, {"top_p": "0.000001"}, {"min_p": "1"}, {"temperature": "0"}])
def test_top_k_top_p_min_p_and_temperature_can_narrow_the_choice_to_one(ask, narrow):
    assert ids_of(ask, {**SAMPLED, **narrow}) == ids_of(ask, GREEDY)


def test_logit_bias_forbids_and_forces_a_token(ask):
    first = ids_of(ask, GREEDY)[0]
    assert first not in ids_of(ask, {**GREEDY, "logit_bias": json.dumps({first: -100})})
    assert ids_of(ask, {**GREEDY, "max_tokens": "5", "logit_bias": json.dumps({"40": 100})}) == [40] * 5


def test_each_penalty_holds_a_token_back_that_has_come(ask):
    parameters = {**GREEDY, "max_tokens": "12"}

    def count(bias, **more):
        return ids_of(ask, {**parameters, **more, "logit_bias": f'{{"50": {bias}}}'}).count(50)

    # Just enough for the token to come most of the time: a penalty takes that away again.
    bias = next(half / 2 for half in range(8, 120) if count(half / 2) >= 10)
    for penalty in ({"presence_penalty": "2"}, {"frequency_penalty": "2"}, {"repetition_penalty": "1.8"}):
        assert count(bias, **penalty) < count(bias), penalty


def test_min_tokens_keeps_an_answer_from_ending_and_ignore_eos_for_ever(ask):
    ending = {"temperature": "0", "max_tokens": "40", "stop_token_ids": str(ids_of(ask, GREEDY)[3])}
    lengths = [
        ask({**ending, **more}, return_num_output_tokens=True)["num_output_tokens"][0]
        for more in ({}, {"min_tokens": "20"})
    ]
    assert lengths[0] <= 4 < 20 <= lengths[1]


def test_stop_token_ids_end_an_answer_and_add_no_text_unless_included(ask, tokenizer):
    ids = ids_of(ask, GREEDY)
    stop = ids[3]
    expected = ids[: ids.index(stop) + 1]
    for included, shown in (("false", expected[:-1]), ("true", expected)):
        parameters = {**GREEDY, "stop_token_ids": f"[{stop}]", "include_stop_str_in_output": included}
        outputs = ask(parameters, return_token_ids=True, return_finish_reason=True)
        assert (outputs["token_ids"], outputs["finish_reason"]) == (expected, [b"stop"])
        assert outputs["text_output"][0].decode() == tokenizer.decode(shown)


def test_nothing_past_a_stop_string_leaves_in_any_output(server, ask, tokenizer):
    whole = ask(GREEDY)["text_output"][0].decode()
    stop = whole[9:13]
    for stream in (False, True):
        inputs = inputs_of(text_input=PROMPT, stream=stream, exclude_input_in_output=True, **ALL_FLAGS)
        parameters = {**GREEDY, "stop": stop, "logprobs": "0"}
        results, _ = infer(server.grpc_url, inputs, parameters)
        ids = [token_id for result in results for token_id in result.as_numpy("token_ids").tolist()]
        assert text_of(results) == whole[: whole.index(stop)]
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])
        assert sum(len(json.loads(result.as_numpy("logprobs")[0])) for result in results) == len(ids)
        assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == len(ids)
        assert results[-1].as_numpy("finish_reason").tolist() == [b"stop"]
        assert json.loads(results[-1].as_numpy("spec_stats")[0])["num_drafts"] > 0


def test_include_stop_str_in_output_keeps_the_stop_string(ask):
    whole = ask(GREEDY)["text_output"][0].decode()
    stop = whole[9:13]
    text = ask({**GREEDY, "stop": stop, "include_stop_str_in_output": "true"})["text_output"][0].decode()
    assert text == whole[: whole.index(stop) + len(stop)]


def test_skip_special_tokens_shows_or_hides_them(ask, tokenizer):
    special = tokenizer.eos_token_ids[0]
    parameters = {"temperature": "0", "max_tokens": "2", "ignore_eos": "true", "logit_bias": json.dumps({special: 100})}
    shown = ask({**parameters, "skip_special_tokens": "false"})["text_output"][0].decode()
    assert shown == tokenizer.decode([special, special], skip_special_tokens=False) != ""
    assert ask(parameters)["text_output"] == [b""]


@pytest.mark.parametrize("stream", [False, True])
def test_steps_add_up_to_the_answer_and_its_statistics(server, stream):
    flags = {"return_steps": True, "return_spec_stats": True, "exclude_input_in_output": True}
    inputs = inputs_of(text_input=PROMPT, stream=stream, **flags)
    results, _ = infer(server.grpc_url, inputs, GREEDY)
    steps = [step for result in results for step in json.loads(result.as_numpy("steps")[0])]
    stats = json.loads(results[-1].as_numpy("spec_stats")[0])
    assert sum(num_tokens for num_tokens, _, _ in steps) == 24
    assert sum(drafts > 0 for _, drafts, _ in steps) == stats["num_drafts"] > 0
    assert sum(drafts for _, drafts, _ in steps) == stats["num_draft_tokens"]
    assert sum(num_tokens - 1 for num_tokens, _, _ in steps) == stats["num_accepted_tokens"]
    assert sum(num_chars for _, _, num_chars in steps) == len(text_of(results))


def test_num_speculative_tokens_of_0_drafts_nothing_and_changes_no_token(ask):
    drafted = ask(GREEDY, return_token_ids=True, return_spec_stats=True)
    plain = ask({**GREEDY, "num_speculative_tokens": "0"}, return_token_ids=True, return_spec_stats=True)
    assert drafted["token_ids"] == plain["token_ids"]
    assert json.loads(drafted["spec_stats"][0])["num_drafts"] > 0
    assert json.loads(plain["spec_stats"][0])["num_drafts"] == 0


def test_cache_salt_keeps_prefixes_apart(ask):
    long_prompt = PROMPT + " Be brief." * 30

    def cached(salt):
        stats = ask({"max_tokens": "1", "cache_salt": salt}, text_input=long_prompt, return_spec_stats=True)
        return json.loads(stats["spec_stats"][0])["num_cached_tokens"]

    assert cached("red") == 0
    assert cached("red") > 0
    assert cached("blue") == 0


def test_how_much_was_cached_is_told_only_to_requests_with_a_salt(ask):
    """Among requests that share the cache the number says what others have sent."""
    for salt, told in ((None, type(None)), ("", type(None)), ("mine", int)):
        parameters = {"max_tokens": "1"} | ({} if salt is None else {"cache_salt": salt})
        stats = json.loads(ask(parameters, return_spec_stats=True)["spec_stats"][0])
        assert type(stats["num_cached_tokens"]) is told


def test_a_prompt_may_hold_any_character(ask, post):
    text = "a\0b\u2028 \U0001f642 \u202eabc\ufffd"
    over_grpc = ask({**GREEDY, "max_tokens": "3"}, text_input=text, exclude_input_in_output=False)["text_output"][0]
    assert over_grpc.decode().startswith(text)
    assert post(text_input=text, **{**GREEDY, "max_tokens": "3"}).json()["text_output"] == over_grpc.decode()


def test_the_log_names_every_setting_at_the_start_and_never_a_prompt(server_log, ask):
    ask({"max_tokens": 2}, text_input="xyzzy plugh")
    (settings,) = [line for line in server_log if line.startswith("dflash: settings: ")]
    names = [part.partition("=")[0] for part in settings.removeprefix("dflash: settings: ").split()]
    assert names == sorted(setting.name for setting in SETTINGS)
    assert "max_num_seqs=8" in settings
    assert not any("xyzzy" in line for line in server_log)
