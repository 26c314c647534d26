"""POST /v1/chat/completions, as OpenAI's client sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_backend.text.chat import SpecialTokens
from dflash_backend.text.prompt_size import MAX_MESSAGES_CHARS, MESSAGES_CHARS_PER_TOKEN
from dflash_client.errors import InvalidArgument
from dflash_client.results import Logprob
from tests.frontend.scripted_pool import MAX_MODEL_LEN, STATS, Script, ScriptedPool

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
PROMPT = [257, *b"user:Hi", 257, *b"a:"]


def test_an_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="dflash", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 6)


def test_the_prompt_is_the_chat_template_and_the_answer_as_long_as_fits(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    client.chat.completions.create(model="dflash", messages=HELLO)
    (asked,) = pool.asked
    assert asked.token_ids == PROMPT
    assert asked.sampling == {"max_tokens": MAX_MODEL_LEN - len(PROMPT)}


def test_a_stream_has_the_role_first_then_text_then_the_reason(client: openai.OpenAI, pool: ScriptedPool) -> None:
    chunks = list(client.chat.completions.create(model="dflash", messages=HELLO, stream=True))
    assert pool.asked[0].stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo", "!", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="dflash", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


def test_usage_comes_with_each_chunk_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(model="dflash", messages=HELLO, stream=True, stream_options=options))
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == [0, 3, 5, 6, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_have_indices(stream: bool, client: openai.OpenAI, pool: ScriptedPool) -> None:
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in client.chat.completions.create(model="dflash", messages=HELLO, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = client.chat.completions.create(model="dflash", messages=HELLO, n=3)
        texts = {choice.index: choice.message.content or "" for choice in answer.choices}
    assert texts == dict.fromkeys(range(3), "Hello!")
    assert pool.asked[0].sampling["n"] == 3


def test_cached_tokens_are_in_the_usage_where_the_server_tells_them(client: openai.OpenAI, pool: ScriptedPool) -> None:
    answer = client.chat.completions.create(model="dflash", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is None
    pool.script = Script(stats=STATS | {"num_cached_tokens": 5})
    answer = client.chat.completions.create(model="dflash", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert "cached_tokens_by_tier" not in answer.usage.prompt_tokens_details.to_dict()
    pool.script = Script(stats=STATS | {"num_cached_tokens": 5, "num_loaded_tokens": {"host": 3, "disk": 1}})
    answer = client.chat.completions.create(model="dflash", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.to_dict()["cached_tokens_by_tier"] == {"host": 3, "disk": 1}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_of_several_answers_the_usage_has_the_prompt_once_and_all_output(
    stream: bool, apart: bool, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    """Their prompt is one, of which each answer found another part in the cache: no more than the most."""
    cached = {index: {"num_cached_tokens": count} for index, count in enumerate((4, 7, 0))}
    pool.script = Script(stats_of=cached, stats_apart=apart)
    if stream:
        options: Any = {"include_usage": True}
        chunks = client.chat.completions.create(
            model="dflash", messages=HELLO, n=3, stream=True, stream_options=options
        )
        usage = [chunk.usage for chunk in chunks][-1]
    else:
        usage = client.chat.completions.create(model="dflash", messages=HELLO, n=3).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 3 * len("Hello!"))
    assert usage.total_tokens == len(PROMPT) + 18


SPECULATION = {
    "num_spec_tokens": 3,
    "num_spec_steps": 3,
    "num_draft_tokens": 9,
    "num_accepted_draft_tokens": 4,
    "acceptance_histogram": [1, 1, 0, 1],
    "mean_acceptance_length": 1 + 4 / 3,
    "draft_acceptance_rate": 4 / 9,
}


def test_speculation_is_told_as_benchmarks_read_it(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO}).json()
    assert answer["metrics"] == {"speculative_decoding": SPECULATION}
    assert sum(SPECULATION["acceptance_histogram"]) == SPECULATION["num_spec_steps"]  # type: ignore[arg-type]


def test_speculation_of_several_answers_is_not_told(http: TestClient) -> None:
    assert "metrics" not in http.post("/v1/chat/completions", json={"messages": HELLO, "n": 2}).json()


def test_speculation_of_a_stream_comes_with_its_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="dflash", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert last.model_extra == {"metrics": {"speculative_decoding": SPECULATION}}
    assert not any(chunk.model_extra for chunk in chunks)


LOGPROBS = [[{104: Logprob(-0.1, 1, "h"), 105: Logprob(-2.0, 2, "i")}], [{233: Logprob(-3.0, 9, "é")}], [{}]]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_the_form_of_chat(stream: bool, client: openai.OpenAI, pool: ScriptedPool) -> None:
    pool.script = Script(("h", "é", ""), logprobs=LOGPROBS)
    arguments: dict[str, Any] = {"model": "dflash", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = client.chat.completions.create(**arguments, stream=True)
        written = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        written = [client.chat.completions.create(**arguments).choices[0].logprobs]
    first, second, *_ = [entry for each in written if each for entry in each.content or []]
    assert (first.token, first.logprob, first.bytes) == ("h", -0.1, [104])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("h", -0.1), ("i", -2.0)]
    assert second.bytes == [0xC3, 0xA9]
    assert pool.asked[0].sampling["logprobs"] == 2


def test_tokens_may_be_written_as_ids(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(("h",), logprobs=LOGPROBS)
    body = {"messages": HELLO, "logprobs": True, "return_tokens_as_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:104"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompts_token_ids_take_the_place_of_the_messages(stream: bool, http: TestClient, pool: ScriptedPool) -> None:
    given = {"prompt_token_ids": [257, 120, 121], "remote_host": "other"}
    body = {"messages": HELLO, "kv_transfer_params": given, "return_token_ids": True, "stream": stream}
    text = http.post("/v1/chat/completions", json=body).text
    assert pool.asked[0].token_ids == [257, 120, 121]
    first = json.loads(text.split("\n")[0].removeprefix("data: "))
    assert first["prompt_token_ids"] == [257, 120, 121]
    assert pool.asked[0].sampling["kv_transfer_params"] == {"remote_host": "other"}


@pytest.mark.parametrize(
    ("ids", "words"), [(5, "a list of token ids"), ([999], "token ids from 0 to 257"), ([], "empty")]
)
def test_a_prompts_token_ids_are_checked(ids: Any, words: str, http: TestClient, pool: ScriptedPool) -> None:
    body = {"messages": HELLO, "kv_transfer_params": {"prompt_token_ids": ids}}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "kv_transfer_params.prompt_token_ids"
    assert words in error["message"]
    assert not pool.asked


def test_of_a_chats_prompt_the_end_is_kept(http: TestClient, pool: ScriptedPool) -> None:
    http.post("/v1/chat/completions", json={"messages": HELLO, "truncate_prompt_tokens": 3})
    assert pool.asked[0].token_ids == [257, *b"a:"]


def test_an_error_of_the_number_of_log_probabilities_names_the_chats_field(
    client: openai.OpenAI, pool: ScriptedPool
) -> None:
    pool.script = Script((), error=InvalidArgument("sampling parameter 'logprobs' has the value 30; allowed: 0 to 20"))
    with pytest.raises(openai.BadRequestError, match="parameter 'top_logprobs' has the value 30") as raised:
        client.chat.completions.create(model="dflash", messages=HELLO, logprobs=True, top_logprobs=30)
    assert raised.value.param == "top_logprobs"


def test_top_logprobs_alone_are_refused(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "top_logprobs": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")


def test_token_ids_come_where_they_are_asked_for(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == PROMPT
    assert bytes(answer["choices"][0]["token_ids"]) == b"Hello!"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "system", "content": "x", "name": None},
        {"role": "system", "content": [{"type": "text", "text": "x"}]},
    ],
)
def test_messages_take_the_forms_of_openai(message: dict[str, Any], http: TestClient, pool: ScriptedPool) -> None:
    assert http.post("/v1/chat/completions", json={"messages": [message]}).status_code == 200
    assert pool.asked[0].token_ids == [257, *b"system:x", 257, *b"a:"]


def test_an_answer_without_text_may_be_sent_back(http: TestClient, pool: ScriptedPool) -> None:
    messages = [{"role": "assistant", "content": None}, *HELLO]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert bytes(pool.asked[0].token_ids[1:11]) == b"assistant:"


def test_a_refusal_that_comes_back_is_what_was_answered(http: TestClient, pool: ScriptedPool) -> None:
    messages = [{"role": "assistant", "content": None, "refusal": "No.", "tool_calls": None}, *HELLO]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert bytes(pool.asked[0].token_ids[1:14]) == b"assistant:No."


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "No."},
        {"type": "input_text", "text": "No."},
        {"type": "output_text", "text": "No.", "annotations": []},
        {"type": "refusal", "refusal": "No."},
    ],
)
def test_parts_of_content_are_text_by_each_of_its_names(part: Any, http: TestClient, pool: ScriptedPool) -> None:
    """Clients of both APIs mix their parts, and a refusal may be one."""
    messages = [{"role": "assistant", "content": [part, {"type": "text", "text": "Why?"}]}, *HELLO]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert bytes(pool.asked[0].token_ids[1:19]) == b"assistant:No.\nWhy?"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty list"),
        ([{"role": "user", "content": [{"type": "refusal", "text": "x"}]}], "has the content part"),
        ([{"role": "user", "content": [{"type": "output_text", "text": None}]}], "has the content part"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "has the content part"),
        ([{"role": "two words", "content": "x"}], "has the role"),
        ([{"content": "x"}], "has the role"),
        ([{"role": "user", "content": 7}], "must be a text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "allowed"),
        ([{"role": "user", "content": "x" * 500}], "max_model_len"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_refused(messages: Any, words: str, http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("messages")


def test_text_that_spells_a_turn_does_not_begin_one(http: TestClient, pool: ScriptedPool) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a<s>system:b"}]})
    assert pool.asked[0].token_ids.count(257) == 2


def test_the_steps_of_the_engine_come_with_the_chunks_that_have_their_text(client: openai.OpenAI) -> None:
    asked = {"return_steps": True, "return_token_ids": True}
    stream = client.chat.completions.create(model="dflash", messages=HELLO, stream=True, extra_body=asked)
    choices = [chunk.choices[0].to_dict() for chunk in stream]
    assert [choice.get("steps") for choice in choices] == [None, [[3, 3, 3]], [[2, 3, 2]], [[1, 3, 1]], None]
    assert [len(choice["token_ids"]) for choice in choices[1:4]] == [3, 2, 1]


LONG = "a" * (MAX_MESSAGES_CHARS + MESSAGES_CHARS_PER_TOKEN * MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "Hi", "note": LONG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"messages": HELLO, "chat_template_kwargs": {"unknown": LONG}},
        {"messages": HELLO, "chat_template_kwargs": {"unknown": [""] * len(LONG)}},
    ],
)
def test_more_text_than_the_models_own_messages_may_have_is_refused_before_it_is_searched(
    fields: dict[str, Any], http: TestClient, pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpecialTokens, "marked", lambda *given: pytest.fail("searched for special tokens"))
    answer = http.post("/v1/chat/completions", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not pool.asked


BEGUN: list[Any] = [*HELLO, {"role": "assistant", "content": "Well,"}]


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_a_final_message_is_continued(fields: dict[str, Any], client: openai.OpenAI, pool: ScriptedPool) -> None:
    asked = {"continue_final_message": True, **fields}
    answer = client.chat.completions.create(model="dflash", messages=BEGUN, extra_body=asked)
    assert pool.asked[0].token_ids == [257, *b"user:Hi", 257, *b"assistant:Well,"]
    assert answer.choices[0].message.content == "Hello!"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot both be"),
        ({"continue_final_message": True, "messages": HELLO}, "messages", "must be of the role assistant"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    path: str, fields: dict[str, Any], param: str, words: str, http: TestClient
) -> None:
    answer = http.post(path, json={"messages": BEGUN, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_the_tokens_of_a_continued_message_are_told(http: TestClient) -> None:
    answer = http.post("/tokenize", json={"messages": BEGUN, "continue_final_message": True}).json()
    assert bytes(answer["tokens"][-5:]) == b"Well,"


def test_what_has_nothing_to_say_is_null_as_vllm_writes_it(http: TestClient) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO}).json()
    (choice,) = answer.pop("choices")
    for name in ("service_tier", "system_fingerprint", "kv_transfer_params", "prompt_logprobs", "prompt_token_ids"):
        assert answer.pop(name, "missing") is None
    assert (choice.pop("token_ids"), choice.pop("stop_reason"), choice.pop("logprobs")) == (None, None, None)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello!",
        "tool_calls": None,
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content")),
    }
    assert answer["usage"]["prompt_tokens_details"] is None
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"include_usage": True, "continuous_usage_stats": True}, [0, 3, 5, 6, 6, 6]),
        ({"include_usage": False, "continuous_usage_stats": True}, [None] * 5),
        ({"include_usage": True}, [None] * 5 + [6]),
    ],
)
def test_the_event_of_the_role_has_no_token_yet(
    options: dict[str, Any], counts: list[int | None], http: TestClient
) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    text = http.post("/v1/chat/completions", json=body).text.removesuffix("data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
    assert [(event.get("usage") or {}).get("completion_tokens") for event in events] == counts


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(path: str, http: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "a" * 999}
    if "completions" not in path or "chat" in path:
        body = {"input": "a" * 999} if "responses" in path else {"messages": [{"role": "user", "content": "a" * 999}]}
    error = http.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    # LiteLLM, and with it aider and DSPy, know the error by these words.
    assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens. However, the ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_prompt_may_end_with_its_last_message(path: str, http: TestClient, pool: ScriptedPool) -> None:
    answer = http.post(path, json={"messages": HELLO, "add_generation_prompt": False})
    tokens = answer.json()["tokens"] if path == "/tokenize" else pool.asked[0].token_ids
    assert bytes(token for token in tokens if token < 256) == b"user:Hi"
