"""Parameters of OpenAI and vLLM reach the model, and wrong ones are named."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from starlette.testclient import TestClient

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
    "truncate_prompt_tokens": 5,
    "cache_salt": "me",
    "priority": 2,
    "num_speculative_tokens": 2,
    "best_of": 2,
    "use_beam_search": False,
    "length_penalty": 1.0,
}


def test_parameters_reach_the_model_by_their_names(client: openai.OpenAI, pool: ScriptedPool) -> None:
    client.completions.create(model="dflash", prompt="a", **PARAMETERS, extra_body=VLLM)
    assert pool.asked[0].sampling == {**PARAMETERS, **VLLM, "max_tokens": 16}


def test_a_null_is_a_parameter_that_is_left_out(http: TestClient, pool: ScriptedPool) -> None:
    body = {"prompt": "a", **dict.fromkeys([*PARAMETERS, *VLLM, "stream", "stream_options", "model", "user"])}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert pool.asked[0].sampling == {"max_tokens": 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
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
        ({"functions": []}, "unknown field 'functions'; send them as 'tools'"),
        ({"function_call": "auto"}, "unknown field 'function_call'; send 'tool_choice'"),
        ({"web_search_options": {}}, "unknown field 'web_search_options'; this server searches nothing"),
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
