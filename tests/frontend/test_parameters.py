"""Parameters of OpenAI and vLLM reach the model, and wrong ones are named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from starlette.testclient import TestClient

from dflash_backend.text.chat import with_reasoning_names
from dflash_backend.text.vllm_parameters import VLLM_PARAMETERS
from dflash_openai.anthropic_request import MessagesRequest, as_chat
from dflash_openai.chat import template_options
from dflash_openai.sampling import SAME_NAMES, truncation
from dflash_openai.schemas import ChatRequest, CompletionRequest
from tests.frontend.scripted_pool import ScriptedPool

PARAMETERS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {"7": -5.0},
    "seed": 3,
    "stop": ["x"],
}
VLLM: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "cache_salt": "me",
    "priority": 2,
    "record_traffic": True,
    "num_speculative_tokens": 2,
    "best_of": 2,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "stream_interval": 8,
}


def test_parameters_reach_the_model_by_their_names(client: openai.OpenAI, pool: ScriptedPool) -> None:
    client.completions.create(model="dflash", prompt="a", **PARAMETERS, extra_body=VLLM)
    assert pool.asked[0].sampling == {**PARAMETERS, **VLLM, "max_tokens": 16}


def test_a_null_is_a_parameter_that_is_left_out(http: TestClient, pool: ScriptedPool) -> None:
    body = {"prompt": "a", **dict.fromkeys([*PARAMETERS, *VLLM, "stream", "stream_options", "model", "user"])}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert pool.asked[0].sampling == {"max_tokens": 16}


def test_store_of_false_keeps_a_request_from_being_written_down(http: TestClient, pool: ScriptedPool) -> None:
    chat = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a", "store": False, "record_traffic": True}),
        ("/v1/chat/completions", {"messages": chat, "store": False}),
        ("/v1/chat/completions", {"messages": chat, "record_traffic": False}),
        ("/v1/responses", {"input": "a", "store": False}),
        ("/v1/responses", {"input": "a", "record_traffic": False}),
    ):
        assert http.post(path, json=body).status_code == 200
        assert pool.asked[-1].sampling["record_traffic"] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
        {"prompt_cache_key": "k", "safety_identifier": "s", "request_id": "r"},
        {"service_tier": "flex", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"}},
        {"response_format": {"type": "text"}},
    ],
)
def test_what_has_no_effect_here_is_taken(fields: dict[str, Any], http: TestClient, pool: ScriptedPool) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200
    assert pool.asked[0].sampling == {"max_tokens": 16}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ],
)
def test_structured_output_is_the_models(
    fields: dict[str, Any], expected: dict[str, Any], http: TestClient, pool: ScriptedPool
) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200
    assert pool.asked[0].sampling == {**expected, "max_tokens": 16}


def test_two_structures_of_one_answer_are_refused(http: TestClient) -> None:
    body = {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "response_format and guided_regex" in answer.json()["error"]["message"]


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_a_chat_takes_every_verbosity(verbosity: str, http: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "verbosity": verbosity}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"echo": True}, "'echo' is true, but a chat's answer repeats no message"),
        ({"functions": []}, "unknown field 'functions'; send them as 'tools'"),
        ({"function_call": "auto"}, "unknown field 'function_call'; send 'tool_choice'"),
        ({"store": True}, "'store' is true, but this server keeps no answers"),
    ],
)
def test_what_openai_has_and_this_server_has_not_is_told_with_what_to_do(
    fields: dict[str, Any], message: str, http: TestClient, pool: ScriptedPool
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"] == next(iter(fields))
    assert not pool.asked


def test_max_completion_tokens_wins(http: TestClient, pool: ScriptedPool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "max_completion_tokens": 7}
    http.post("/v1/chat/completions", json=body)
    assert pool.asked[0].sampling["max_tokens"] == 7


def test_the_models_own_default_of_max_tokens_holds(http: TestClient, pool: ScriptedPool) -> None:
    # The front end knows the description from the beginning, so it is changed in place.
    pool.description.sampling_defaults["max_tokens"] = 33
    try:
        http.post("/v1/completions", json={"prompt": "a"})
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
    finally:
        del pool.description.sampling_defaults["max_tokens"]
    assert [asked.sampling["max_tokens"] for asked in pool.asked] == [33, 4]


# A value that no field takes, but for those of any type.
WRONG = {"wrong": {"type": []}}


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(CompletionRequest)])
def test_a_wrong_type_in_a_completion_is_named(field: str, http: TestClient, pool: ScriptedPool) -> None:
    wrong = 7 if "dict" in str(CompletionRequest.__annotations__.get(field, "")) or field in OBJECTS else WRONG
    answer = http.post("/v1/completions", json={"prompt": "a"} | {field: wrong})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").partition(".")[0] == field
    assert not pool.asked


OBJECTS = (
    "kv_transfer_params",
    "logit_bias",
    "metadata",
    "prompt_cache_options",
    "response_format",
    "structured_outputs",
    "guided_json",
    "stream_options",
)
CHAT_OBJECTS = (*OBJECTS, "chat_template_kwargs", "tool_choice", "prediction")


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(ChatRequest)])
def test_a_wrong_type_in_a_chat_is_named(field: str, http: TestClient, pool: ScriptedPool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post("/v1/chat/completions", json=body | {field: 7.5 if field in CHAT_OBJECTS else WRONG})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").partition(".")[0] == field
    assert not pool.asked


INTEGERS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens", "top_k", "seed", "n", "min_tokens", "priority"),
    "/v1/completions": ("max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens", "best_of", "top_k"),
    "/v1/responses": ("max_output_tokens", "top_k", "seed", "max_tool_calls"),
}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/detokenize": {},
}


@pytest.mark.parametrize(("path", "field"), [(path, name) for path, names in INTEGERS.items() for name in names])
def test_a_whole_number_may_be_written_as_a_float(path: str, field: str, http: TestClient, pool: ScriptedPool) -> None:
    asked: list[Any] = []
    for value in (1.0, 1):
        assert http.post(path, json=PLAIN[path] | {field: value}).status_code == 200
        asked.append(pool.asked[-1].sampling)
    assert asked[0] == asked[1]
    assert all(type(value) is not float for value in asked[0].values())


@pytest.mark.parametrize("value", ["2.5", '"2"', "true", "1e400", "1e30", "-1e19", "[1.0]"])
@pytest.mark.parametrize(("path", "field"), [(path, names[0]) for path, names in INTEGERS.items()])
def test_what_is_no_whole_number_is_refused_by_the_name_of_its_field(
    path: str, field: str, value: str, http: TestClient, pool: ScriptedPool
) -> None:
    body = json.dumps(PLAIN[path])[:-1] + f', "{field}": {value}}}'
    answer = http.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not pool.asked


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("path", "field"), [(path, name) for path, names in INTEGERS.items() for name in names if name != "n"]
)
def test_a_number_of_400_digits_is_the_clients_mistake(path: str, field: str, sign: str, http: TestClient) -> None:
    """It becomes no float, in whatever is computed with it. (This stand-in of a model would make `n` answers.)"""
    several: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "logprobs": 2}
    for more in (PLAIN[path], several if path == "/v1/completions" else {"top_logprobs": 2}):
        body = json.dumps({name: value for name, value in (PLAIN[path] | more).items() if name != field})
        answer = http.post(path, content=f'{body[:-1]}, "{field}": {sign}{"1" * 400}}}')
        assert answer.status_code < 500, answer.text


def test_so_it_is_in_lists_of_token_ids(http: TestClient, pool: ScriptedPool) -> None:
    body = {"prompt": [97.0, 98], "stop_token_ids": [5.0, 6], "allowed_token_ids": [7.0]}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert pool.asked[0].token_ids == [97, 98]
    assert pool.asked[0].sampling == {"stop_token_ids": [5, 6], "allowed_token_ids": [7], "max_tokens": 16}
    assert {type(each) for each in (*pool.asked[0].token_ids, *pool.asked[0].sampling["stop_token_ids"])} == {int}
    assert http.post("/v1/completions", json={"prompt": [[97.0], [98]]}).status_code == 200
    assert [asked.token_ids for asked in pool.asked[1:]] == [[97], [98]]
    assert http.post("/detokenize", json={"tokens": [97.0, 98]}).json() == {"prompt": "ab"}
    for path, fields, param in (
        ("/v1/completions", {"prompt": [97.0, 2.5]}, "prompt"),
        ("/v1/completions", {"prompt": [97.0, True]}, "prompt"),
        ("/v1/completions", {"prompt": [1e30]}, "prompt"),
        ("/v1/chat/completions", {"stop_token_ids": [5.0, 2.5]}, "stop_token_ids[1]"),
        ("/detokenize", {"tokens": [97.0, True]}, "tokens[1]"),
    ):
        answer = http.post(path, json=PLAIN[path] | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_one_and_zero_are_booleans(http: TestClient, pool: ScriptedPool) -> None:
    chat = PLAIN["/v1/chat/completions"]
    streamed = {"stream": 1, "stream_options": {"include_usage": 1.0}, "logprobs": 1, "ignore_eos": 0}
    answer = http.post("/v1/chat/completions", json=chat | streamed)
    assert '"usage":{' in answer.text
    assert pool.asked[0].sampling | {"max_tokens": 0} == {"logprobs": 0, "ignore_eos": False, "max_tokens": 0}
    for fields in ({"logprobs": 2}, {"stream_options": {"include_usage": 2}}, {"stream": "1"}):
        assert http.post("/v1/chat/completions", json=chat | fields).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "max"},
        {"reasoning_effort": "new"},
        {"verbosity": "max"},
        {"service_tier": "new"},
        {"modalities": ["text", "audio"]},
        {"session_id": "s1"},
        {"thinking_token_budget": None},
        {"thinking_token_budget": -1, "logits_processors": [], "flat_logprobs": False, "detokenize": True},
    ],
)
def test_words_that_the_api_may_add_are_taken(fields: dict[str, Any], http: TestClient, pool: ScriptedPool) -> None:
    answer = http.post("/v1/chat/completions", json=PLAIN["/v1/chat/completions"] | fields)
    assert answer.status_code == 200
    assert set(pool.asked[0].sampling) == {"max_tokens"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking_token_budget": 8}, "allowed: null or -1; 'chat_template_kwargs' can switch thinking off"),
        ({"logits_processors": ["x"]}, "'logit_bias' changes the logits"),
        ({"repetition_detection": {"n": 1}}, "hold repetition back"),
        ({"thinking": {"type": "enabled"}}, "unknown field 'thinking'; send 'enable_thinking'"),
    ],
)
def test_parameters_of_vllm_that_are_not_here_are_told_with_what_to_do(
    path: str, fields: dict[str, Any], words: str, http: TestClient, pool: ScriptedPool
) -> None:
    answer = http.post(path, json=PLAIN[path] | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
    assert words in answer.json()["error"]["message"]
    assert not pool.asked


def test_every_parameter_of_vllm_that_is_not_here_is_known_by_its_name(http: TestClient) -> None:
    for name, known in VLLM_PARAMETERS.items():
        if name not in SAME_NAMES:
            answer = http.post("/v1/completions", json={"prompt": "a", name: ["asks for something"]})
            assert answer.json()["error"]["message"].endswith(known.instead)
            assert answer.json()["error"]["param"] == name


def test_an_answer_without_text_cannot_be_asked_for(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json=PLAIN["/v1/chat/completions"] | {"modalities": ["audio"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "modalities")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": False}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": True}),
        (
            {"enable_thinking": True, "reasoning_effort": "none"},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}, "reasoning_effort": "high"},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_what_a_chat_says_itself_of_its_template_holds_over_what_follows_from_another_field(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert template_options(ChatRequest(messages=[], **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "enable_thinking", False),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "enable_thinking", True),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop", ["a"]),
        ({"stop_sequences": [], "stop": ["b"]}, "stop", ["b"]),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}}}
            | {"output_format": {"type": "json_schema", "schema": {"const": 2}}},
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "output", "schema": {"const": 1}}},
        ),
    ],
)
def test_of_two_fields_of_a_message_anthropics_newest_own_holds(
    fields: dict[str, Any], name: str, expected: Any
) -> None:
    body = MessagesRequest(messages=[{"role": "user", "content": "a"}], max_tokens=1, **fields)
    assert getattr(as_chat(body), name) == expected


def test_what_fits_beside_an_answer_goes_by_the_limit_that_the_answer_has() -> None:
    body = ChatRequest(messages=[], max_tokens=9, max_completion_tokens=5, truncate_prompt_tokens=-1)
    kept = truncation(body, 100)
    assert kept is not None
    assert kept.num_tokens == 95


def test_a_template_that_reads_one_name_of_reasoning_gets_what_was_sent_by_it() -> None:
    sent = {"role": "assistant", "reasoning": "one", "reasoning_content": "other"}
    assert with_reasoning_names(sent) == {**sent, "thinking": "other"}
