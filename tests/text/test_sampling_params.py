"""Sampling parameters from outside: types, bounds, and what the messages say."""

import itertools
import json

import pytest

from dflash_backend.messages import ENCODER, ENGINE_INPUT, GenerationRequest, KVTransferParams, SamplingParams
from dflash_backend.text.parameter_values import INT64_MAX
from dflash_backend.text.sampling_params import (
    LOWEST_TEMPERATURE,
    MAX_LOGPROBS,
    ParameterError,
    child,
    parse_sampling_params,
)
from dflash_backend.text.vllm_parameters import VLLM_PARAMETERS


def parse(max_speculative_tokens: int | None = 7, **values):
    return parse_sampling_params(values, max_speculative_tokens=max_speculative_tokens, vocab_size=100, max_n=8)


def test_nothing_given_is_the_defaults():
    assert parse() == SamplingParams()
    assert parse(temperature=None, stop=None, seed=None) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "expected", "values"),
    [
        ("n", 3, ["3"]),
        ("max_tokens", 64, ["64"]),
        ("ignore_eos", True, ["true"]),
        ("skip_special_tokens", False, ["False"]),
        ("presence_penalty", -0.5, ["-0.5"]),
        ("frequency_penalty", 2.0, ["2"]),
        ("repetition_penalty", 1.1, ["1.1"]),
        ("stop", ("END",), ["END"]),
        ("stop", ("a", "b"), [["a", "b"], '["a", "b"]', ["a", "b", "a"]]),
        ("stop", ("[x",), ["[x"]),
        ("stop", (), [[]]),
        ("stop_token_ids", (5, 6), [[5, 6], "[5, 6]", ("5", 6), [5, 6, 5]]),
        ("stop_token_ids", (), [[]]),
        ("top_k", 0, [-1]),
        ("top_k", 20, ["20"]),
        ("temperature", LOWEST_TEMPERATURE, [1e-9]),
        ("temperature", 0.0, [0]),
        ("temperature", 1.0, ["1."]),
        ("temperature", 0.5, [".5", "5E-1"]),
        ("temperature", 2.0, ["+2"]),
        ("seed", None, [-1]),
        ("seed", 0, [0, 2**63]),
        ("seed", 2**63 - 1, [2**63 - 1, 2**64 - 1]),
        ("seed", 2**63 - 2, [-2]),
        ("seed", 2**63 - 5, ["-5"]),
        ("logprobs", 1, [True, "true"]),
        ("logprobs", 0, [False, "False", "0"]),
        ("logprobs", 20, [20]),
        ("logprobs", 7, ["7"]),
        ("logprobs", None, [None]),
        ("allowed_token_ids", (5, 99), [[5, 99, 5], "[5, 99]", ["5", 99.0]]),
        ("allowed_token_ids", None, [None]),
        ("bad_words", ("a b", "c"), [["a b", "c", "c"], '["a b", "c"]']),
        ("bad_words", ("a",), ["a"]),
        ("bad_words", (), [[], None]),
        ("logit_bias", {17: 3.0}, [{17: 3}, {"17": 3}, '{"17": 3}']),
        ("logit_bias", {17: -100.0, 5: 1.5}, ['{"17": -100, "5": "1.5"}']),
        ("logit_bias", {1: 100.0, 2: -100.0}, [{"1": 1e9, "2": -101}]),
    ],
)
def test_a_parameter_may_be_written_in_several_ways(name, expected, values):
    assert [getattr(parse(**{name: value}), name) for value in values] == [expected] * len(values)


def test_null_for_max_tokens_is_as_many_as_fit_and_for_others_the_default():
    assert parse(max_tokens=None, min_tokens=50).max_tokens == INT64_MAX
    assert parse(n=None, temperature=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    "value", ["1_0", "\uff11\uff10", " 10", "10 ", "010", "1e1", "0x10", "10.0", "\u0661\u0660", ""]
)
def test_an_integer_in_text_is_written_as_json_writes_it(value):
    with pytest.raises(ParameterError, match="'max_tokens' has the value"):
        parse(max_tokens=value)
    with pytest.raises(ParameterError, match="'logit_bias' has the value"):
        parse(logit_bias={value: 1})
    with pytest.raises(ParameterError, match="'stop_token_ids' has the value"):
        parse(stop_token_ids=[value])


@pytest.mark.parametrize("value", ["1_0.5", " 1", "\uff11", "01", "infinity", "1e", "0x1", ".", "1" * 500, "1e999"])
def test_a_number_in_text_is_written_as_json_writes_it(value):
    with pytest.raises(ParameterError, match="'temperature' has the value"):
        parse(temperature=value)


@pytest.mark.parametrize("name", ["bad_words", "stop", "stop_words", "stop_sequences"])
def test_an_empty_text_for_a_list_of_texts_asks_for_nothing(name):
    """As TensorRT-LLM's clients write it."""
    assert parse(**{name: ""}) == parse()
    if name not in ("bad_words", "stop"):
        with pytest.raises(ParameterError, match=f"unknown sampling parameter '{name}'; use 'stop'"):
            parse(**{name: "x"})


def test_stops_have_a_number_of_characters_together():
    assert len(parse(stop=["a" * 1000 + str(i) for i in range(4)]).stop) == 4
    with pytest.raises(ParameterError, match="together at most 4096"):
        parse(stop=["a" * 1000 + str(i) for i in range(5)])


def test_no_more_than_half_of_the_vocabulary_may_be_hidden_until_min_tokens():
    """With every token hidden there would be none to choose, and another one would come."""
    assert len(parse(stop_token_ids=list(range(100))).stop_token_ids) == 100
    with pytest.raises(ParameterError, match="with min_tokens at most half of the vocabulary, 50 tokens"):
        parse(stop_token_ids=list(range(51)), min_tokens=1)
    assert parse(stop_token_ids=[5] * 100, min_tokens=1).stop_token_ids == (5,)


def test_a_stop_that_is_a_number_says_how_to_write_it():
    with pytest.raises(ParameterError, match='write the number as text, in JSON "5" with its quotes'):
        parse(stop=5)


PLACE = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 7000, "remote_block_ids": [3, 9]}


def test_parameters_of_a_transfer_are_read_as_vllms_proxies_write_them():
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    first = {"do_remote_decode": True, "do_remote_prefill": False, **nulls}
    assert parse(kv_transfer_params=first).kv_transfer_params == KVTransferParams(do_remote_decode=True)
    second = {**PLACE, "do_remote_decode": False, "remote_engine_id": "x", "tp_size": 1, "other": [{}]}
    expected = KVTransferParams(do_remote_prefill=True, remote_host="a", remote_port=7000, remote_num_blocks=2)
    assert parse(kv_transfer_params=second).kv_transfer_params == expected
    assert parse(kv_transfer_params=json.dumps(second)).kv_transfer_params == expected
    many = parse(kv_transfer_params={**second, "remote_num_blocks": 5000}).kv_transfer_params
    assert many.num_blocks == 5000
    assert parse(kv_transfer_params={}).kv_transfer_params == KVTransferParams()


@pytest.mark.parametrize(
    "given",
    [
        5,
        "a",
        [1],
        {**PLACE, "do_remote_decode": True},
        {**PLACE, "do_remote_prefill": "yes"},
        {**PLACE, "remote_host": None},
        {**PLACE, "remote_host": ""},
        {**PLACE, "remote_host": "a" * 256},
        {**PLACE, "remote_host": "\ud800"},
        {**PLACE, "remote_port": 0},
        {**PLACE, "remote_port": 65536},
        {**PLACE, "remote_port": None},
        {**PLACE, "remote_block_ids": []},
        {**PLACE, "remote_block_ids": 3},
        {**PLACE, "remote_num_blocks": -1},
        {**PLACE, "remote_num_blocks": 10**30},
    ],
)
def test_parameters_of_a_transfer_that_name_no_place_are_refused(given):
    with pytest.raises(ParameterError, match="'kv_transfer_params' has the value .*; allowed: an object with either"):
        parse(kv_transfer_params=given)


class _Unreadable(list):
    """A list of which only the first few items may be read, for a message."""

    def __iter__(self):
        raise AssertionError("the items were read before they were counted")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_list_is_counted_before_its_items_are_read(name):
    with pytest.raises(ParameterError, match=r"\(100000 items\); allowed"):
        parse(**{name: _Unreadable([1] * 100_000)})


def test_a_bias_is_counted_before_its_entries_are_read():
    class Unreadable(dict):
        def items(self):
            yield from itertools.islice(super().items(), 30)
            raise AssertionError("the entries were read before they were counted")

    with pytest.raises(ParameterError, match=r"\(101 items\); allowed: at most 100 entries"):
        parse(logit_bias=Unreadable({str(token_id): 1 for token_id in range(101)}))


def test_a_check_ends_at_the_first_bad_item():
    def items():
        yield "5", "much"
        raise AssertionError("the check went on")

    class Bad(dict):
        calls = 0

        def items(self):
            self.calls += 1
            return items() if self.calls == 1 else iter([("5", "much")])

    with pytest.raises(ParameterError, match="'logit_bias' has the value"):
        parse(logit_bias=Bad({"5": "much"}))


def test_a_name_of_megabytes_is_compared_with_nothing(monkeypatch):
    monkeypatch.setattr("difflib.get_close_matches", lambda *args, **options: pytest.fail("it was compared"))
    with pytest.raises(ParameterError, match=r"unknown sampling parameter 'x+\.\.\. \(3900000 characters\)"):
        parse(**{"x" * 3_900_000: 1})


# Parameters of vLLM, and its defaults.
NULL = """prompt_logprob_token_ids prompt_logprob_start
guided_decoding extra_args skip_reading_prefix_cache thinking_token_budget
repetition_detection trace_decode_token_ids"""
NEUTRAL = dict.fromkeys(NULL.split()) | {
    "flat_logprobs": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "output_kind": 0,
    "skip_clone": False,
    "output_text_buffer_length": 0,
    "routed_experts_prompt_start": 0,
    "best_of": 1,
    "early_stopping": False,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "logits_processors": [],
}


def test_every_parameter_of_vllm_is_taken_at_its_default():
    assert parse(**NEUTRAL) == SamplingParams()
    assert parse(**dict.fromkeys(NEUTRAL)) == SamplingParams()
    assert set(NEUTRAL) == {*VLLM_PARAMETERS, "best_of"}
    texts = {name: json.dumps(value) for name, value in NEUTRAL.items()}
    assert parse(**texts) == SamplingParams()
    assert parse(detokenize="True", use_beam_search="False", extra_args="None", length_penalty="1") == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("prompt_logprob_start", 0, "of the whole prompt"),
        ("flat_logprobs", True, "allowed: null or false; "),
        ("detokenize", False, "return_token_ids"),
        ("detokenize", "false", "return_token_ids"),
        ("output_kind", 2, "'stream'"),
        ("guided_decoding", {"choice": ["a"]}, "use 'structured_outputs'"),
        ("extra_args", {"a": 1}, "plugins"),
        ("skip_reading_prefix_cache", True, "'cache_salt'"),
        ("thinking_token_budget", 5, "'chat_template_kwargs'"),
        ("length_penalty", 1.2, "allowed: null or 1; there is no beam search"),
        ("use_beam_search", "true", "there is no beam search"),
        ("early_stopping", "never", "there is no beam search"),
        ("best_of", 2, "allowed: 1, the value of 'n'"),
        ("best_of", "x", "allowed: 1, the value of 'n'"),
    ],
)
def test_any_other_value_of_a_parameter_of_vllm_is_refused_by_name(name, value, instead):
    with pytest.raises(ParameterError, match=f"'{name}' has the value .*{instead}"):
        parse(**{name: value})


def test_tokens_are_named_for_their_log_probabilities_where_some_are_asked_for():
    assert parse(logprobs=0, logprob_token_ids=[5, "7", 5]).logprob_token_ids == (5, 7)
    assert parse(logprob_token_ids=[]).logprob_token_ids == ()
    for value, words in (([100], "not 100"), (list(range(21)), "a list of at most 20 token ids"), ([-1], "at most 20")):
        with pytest.raises(ParameterError, match=f"'logprob_token_ids' has the value .*{words}"):
            parse(logprobs=0, logprob_token_ids=value)
    with pytest.raises(ParameterError, match="'logprob_token_ids' has the value .*allowed: null without 'logprobs'"):
        parse(logprob_token_ids=[5])


def test_as_many_as_n_is_taken_for_best_of():
    assert parse(n=3, best_of="3").n == 3


@pytest.mark.parametrize(
    ("name", "other"),
    [("max_completion_tokens", "'max_tokens'"), ("max_new_tokens", "'max_tokens'"), ("stop_sequences", "'stop'")],
)
def test_a_name_of_another_server_is_answered_with_ours(name, other):
    with pytest.raises(ParameterError, match=f"unknown sampling parameter '{name}'; use {other}"):
        parse(**{name: 5})


def test_names_of_triton_are_skipped():
    assert parse(triton_anything="x") == SamplingParams()


def test_a_bias_for_no_token_is_refused_where_the_vocabulary_is_known():
    with pytest.raises(
        ParameterError, match="'logit_bias' has the value .*; allowed: token ids from 0 to 99.* not 100"
    ):
        parse(logit_bias={"99": 1, "100": 1})
    unknown = parse_sampling_params({"logit_bias": {"100": 1}}, max_speculative_tokens=None)
    assert unknown.logit_bias == {100: 1.0}


def test_a_long_value_is_quoted_in_part():
    with pytest.raises(ParameterError) as caught:
        parse(stop_token_ids=["x" * 10_000])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("values", "penalised"),
    [
        ({}, False),
        ({"logit_bias": {"5": 1}, "min_tokens": 3}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_only_the_three_penalties_make_a_request_penalised(values, penalised):
    assert parse(**values).penalised is penalised


def test_children_of_a_seeded_request_have_seeds_of_their_own():
    params = SamplingParams(n=3, seed=INT64_MAX, top_p=0.5)
    assert [child(params, index).seed for index in range(3)] == [INT64_MAX, 0, 1]
    assert child(params, 2) == SamplingParams(n=1, seed=1, top_p=0.5)
    assert child(SamplingParams(n=2), 1) == SamplingParams()


def test_what_was_parsed_survives_the_way_to_the_engine():
    params = parse(max_tokens=INT64_MAX, seed=INT64_MAX, logit_bias={"17": -5}, logprobs=3, stop="x")
    request = GenerationRequest("a", [1], params)
    assert ENGINE_INPUT.decode(ENCODER.encode(request)) == request


NOT_ALLOWED = {
    "n": [0, 9, "two"],
    "max_tokens": [0, "many", 1.5, True, INT64_MAX + 1],
    "min_tokens": [-1, 17],
    "temperature": [-0.1, "nan", float("inf")],
    "top_p": [0, 1.01],
    "top_k": [-2, INT64_MAX + 1],
    "min_p": [1.1],
    "seed": [2**64, -(2**63) - 1, "x"],
    "stop": [["a", 1], [""], 5, "[null]", '["\\ud800"]'],
    "stop_token_ids": [[-1], ["x"], [INT64_MAX + 1]],
    "allowed_token_ids": [[], [-1], ["x"], [True], [5, 100]],
    "bad_words": [["a", 1], [""], ["a" * 257], ["a"] * 257, [chr(0xD800)]],
    "ignore_eos": ["maybe"],
    "record_traffic": ["never", 2],
    "num_speculative_tokens": [8],
    "cache_salt": [5],
    "presence_penalty": [2.01, "nan"],
    "frequency_penalty": [-2.01, True],
    "repetition_penalty": [0, "inf", 1e-38, 100.5],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
    "logprobs": [-1, MAX_LOGPROBS + 1, "all"],
    "logit_bias": [
        *("17", [17], '{"17": -100', "[" * 100_000, '{"7": 1, "7": 2}'),
        *({"x": 1}, {"-1": 1}, {"1.5": 1}, {"5": "much"}, {"5": float("nan")}, {"5": None}, {7: 1, "7": 2}),
    ],
}


@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_a_value_that_is_not_allowed_is_named_with_what_is(name):
    for value in NOT_ALLOWED[name]:
        with pytest.raises(ParameterError, match=f"'{name}' has the value .*; allowed: "):
            parse(**{name: value})


def test_speculation_is_unbounded_where_the_server_is_not_known():
    assert parse(None, num_speculative_tokens=100).num_speculative_tokens == 100


def test_an_unknown_name_gets_the_nearest_valid_one():
    with pytest.raises(ParameterError, match="unknown sampling parameter 'max_token'; did you mean 'max_tokens'"):
        parse(max_token=5)
    with pytest.raises(ParameterError, match="the sampling parameters are: n, max_tokens, "):
        parse(xyzzy=5)
