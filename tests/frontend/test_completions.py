"""POST /v1/completions, as OpenAI's client sees it."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from dflash_client.errors import InvalidArgument
from dflash_client.results import Logprob
from dflash_openai.completions import MAX_PROMPTS
from dflash_openai.logprobs import LogprobWriter
from tests.frontend.scripted_pool import MAX_MODEL_LEN, Script, ScriptedPool


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_a_prompt_is_text_or_token_ids_one_or_many(
    prompt: Any, token_ids: list[list[int]], client: openai.OpenAI, pool: ScriptedPool
) -> None:
    answer = client.completions.create(model="dflash", prompt=prompt)
    assert [asked.token_ids for asked in pool.asked] == token_ids
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, "Hello!") for index in range(len(token_ids))
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, token_ids))


def test_an_answer_has_16_tokens_unless_more_are_asked_for(client: openai.OpenAI, pool: ScriptedPool) -> None:
    client.completions.create(model="dflash", prompt="ab")
    client.completions.create(model="dflash", prompt="ab", max_tokens=77)
    client.completions.create(model="dflash", prompt="ab", max_tokens=10**9)
    assert [asked.sampling["max_tokens"] for asked in pool.asked] == [16, 77, MAX_MODEL_LEN - 2]


def test_choices_of_several_prompts_and_answers_are_numbered_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="dflash", prompt=["a", "b"], n=2, echo=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "aHello!"),
        (1, "aHello!"),
        (2, "bHello!"),
        (3, "bHello!"),
    ]


@pytest.mark.parametrize("prompt", [["a", "b"], [[97], [98]]])
def test_a_stream_of_several_prompts_has_all_their_choices(prompt: Any, client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    reasons = {}
    for chunk in client.completions.create(model="dflash", prompt=prompt, n=2, echo=True, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: "aHello!", 1: "aHello!", 2: "bHello!", 3: "bHello!"}
    assert set(reasons.values()) == {"stop"}


def test_log_probabilities_have_the_form_of_completions(client: openai.OpenAI, pool: ScriptedPool) -> None:
    entries = [[{104: Logprob(-0.1, 1, "he"), 105: Logprob(-2.0, 2, "i")}], [{233: Logprob(-3.0, 9, "y")}]]
    pool.script = Script(("he", "y"), logprobs=entries)
    for stream in (False, True):
        found: Any = client.completions.create(model="dflash", prompt="a", logprobs=2, stream=stream)
        written = [choice.logprobs for chunk in (found if stream else [found]) for choice in chunk.choices]
        written = [each for each in written if each]
        assert [token for each in written for token in each.tokens] == ["he", "y"]
        assert [value for each in written for value in each.token_logprobs] == [-0.1, -3.0]
        assert [offset for each in written for offset in each.text_offset] == [0, 2]
        assert written[0].top_logprobs[0] == {"he": -0.1, "i": -2.0}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "stream", "cannot be streamed"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt", "the prompt is empty"),
        ({"prompt": [97, "a"]}, "prompt", "at position 1"),
        ({"prompt": [{"a": 1}]}, "prompt", "is not a text, a list of texts"),
        ({"prompt": [97, True]}, "prompt", "at position 1"),
        ({"prompt": [258]}, "prompt", "0 to 257"),
        ({"prompt": [-1]}, "prompt", "0 to 257"),
        ({"prompt": "a" * 500}, "prompt", "max_model_len is 200"),
        ({"prompt": [97] * 200}, "prompt", "max_model_len is 200"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "allowed: at most"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_what_cannot_be_completed_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str, http: TestClient, pool: ScriptedPool
) -> None:
    answer = http.post("/v1/completions", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert not pool.asked


def test_a_prompt_that_is_too_long_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="dflash", prompt=[97] * 200)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "gh"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "gh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdefgh"),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_of_a_prompt_its_end_or_its_beginning_is_kept(
    more: dict[str, Any], kept: str, as_ids: bool, http: TestClient, pool: ScriptedPool
) -> None:
    prompt: Any = list(b"abcdefgh") if as_ids else "abcdefgh"
    answer = http.post("/v1/completions", json={"prompt": [prompt, prompt], "echo": True, **more}).json()
    assert [bytes(asked.token_ids).decode() for asked in pool.asked] == [kept] * 2
    assert [choice["text"] for choice in answer["choices"]] == [f"{kept}Hello!"] * 2
    assert answer["usage"]["prompt_tokens"] == 2 * len(kept)


def test_a_prompt_that_is_too_long_is_cut_to_what_fits_beside_the_answer(http: TestClient, pool: ScriptedPool) -> None:
    body = {"prompt": "x" * MAX_MODEL_LEN + "y" * 10, "truncate_prompt_tokens": -1, "max_tokens": 7}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert pool.asked[0].token_ids == list(b"x" * (MAX_MODEL_LEN - 17) + b"y" * 10)
    assert pool.asked[0].sampling["max_tokens"] == 7
    for wrong in (0, -2, MAX_MODEL_LEN):
        error = http.post("/v1/completions", json={**body, "truncate_prompt_tokens": wrong}).json()["error"]
        assert error["param"] == "truncate_prompt_tokens"
        assert f"is {wrong}; allowed: an integer from 1 to {MAX_MODEL_LEN - 1}" in error["message"]
    error = http.post("/v1/completions", json={**body, "truncation_side": "middle"}).json()["error"]
    assert "'truncation_side' is 'middle'; allowed: left, which keeps the end, or right" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_request_names_all_come_after_the_chosen_one(
    stream: bool, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    """The model sends these alone; `logprobs` leaves none of them out."""
    entries = [[{104: Logprob(-3.0, 9, "h"), 120: Logprob(-0.1, 1, "x"), 121: Logprob(-5.0, 20, "y")}]]
    pool.script = Script(("h",), logprobs=entries)
    body = {"logprob_token_ids": [120, 121]}
    found: Any = client.completions.create(model="dflash", prompt="a", logprobs=1, stream=stream, extra_body=body)
    written = [choice.logprobs for chunk in (found if stream else [found]) for choice in chunk.choices]
    (top,) = [top for each in written if each for top in each.top_logprobs]
    assert list(top.items()) == [("h", -3.0), ("x", -0.1), ("y", -5.0)]
    assert pool.asked[0].sampling["logprob_token_ids"] == [120, 121]


def test_special_tokens_around_a_prompt_may_be_left_out(http: TestClient, pool: ScriptedPool) -> None:
    http.post("/v1/completions", json={"prompt": "a", "add_special_tokens": False})
    assert pool.asked[0].token_ids == [97]


def test_token_ids_come_where_they_are_asked_for(http: TestClient) -> None:
    body = {"prompt": ["a", "b"], "return_token_ids": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97], [98]]
    assert bytes(choices[1]["token_ids"]) == b"Hello!"


OF_PROMPT = (None, {98: Logprob(-0.5, 1, "b"), 99: Logprob(-1.5, 2, "c")})


def test_echo_with_log_probabilities_has_those_of_the_prompt_first(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(("h",), logprobs=[[{104: Logprob(-0.1, 1, "h")}]], prompt_logprobs=OF_PROMPT)
    (choice,) = http.post("/v1/completions", json={"prompt": "ab", "echo": True, "logprobs": 1}).json()["choices"]
    assert pool.asked[0].sampling["prompt_logprobs"] == 1
    assert choice["text"] == "abh"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "h"],
        "token_logprobs": [None, -0.5, -0.1],
        "top_logprobs": [None, {"b": -0.5}, {"h": -0.1}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("prompt", ["<s>a<s>b", [257, 97, 257, 98]])
def test_each_token_of_an_echoed_prompt_begins_where_its_offset_says(
    prompt: Any, http: TestClient, pool: ScriptedPool
) -> None:
    of_prompt = (
        None,
        {97: Logprob(-0.5, 1, "a")},
        {257: Logprob(-0.5, 1, "<s>")},
        {98: Logprob(-0.5, 1, "b")},
    )
    pool.script = Script(("h",), logprobs=[[{104: Logprob(-0.1, 1, "h")}]], prompt_logprobs=of_prompt)
    (choice,) = http.post("/v1/completions", json={"prompt": prompt, "echo": True, "logprobs": 1}).json()["choices"]
    logprobs = choice["logprobs"]
    assert (choice["text"], logprobs["tokens"]) == ("<s>a<s>bh", ["<s>", "a", "<s>", "b", "h"])
    assert logprobs["text_offset"] == [0, 3, 4, 7, 8]


def test_a_token_that_the_tokenizer_put_before_the_prompt_has_no_characters_in_its_text(http: TestClient) -> None:
    tokenizer = http.app.state.frontend.model().tokenizer  # type: ignore[attr-defined]
    entries = (None, {97: Logprob(-0.5, 1, "a")}, {98: Logprob(-0.5, 1, "b")}, {257: Logprob(-0.1, 1, "")})
    written = LogprobWriter(0, False, tokenizer).completion(entries, (257, "<s>"), "ab")
    assert written["tokens"] == ["<s>", "a", "b", ""]
    assert written["text_offset"] == [0, 0, 1, 2]


def test_a_prompt_is_scored_without_an_answer(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(("h",), logprobs=[[{104: Logprob(-0.1, 1, "h")}]], prompt_logprobs=OF_PROMPT)
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert pool.asked[0].sampling["max_tokens"] == 1
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    usage = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2, "prompt_tokens_details": None}
    assert answer["usage"] == usage


def test_log_probabilities_of_a_prompt_have_vllms_form(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(prompt_logprobs=OF_PROMPT)
    expected = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    answer = http.post("/v1/completions", json={"prompt": "ab", "prompt_logprobs": 2}).json()
    assert answer["choices"][0]["prompt_logprobs"] == expected
    chat = {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 2}
    assert http.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_refuses_a_huge_n_before_anything_is_made_for_each_answer(
    stream: bool, http: TestClient, pool: ScriptedPool
) -> None:
    pool.script = Script(texts=(), error=InvalidArgument("n is too large"))
    tracemalloc.start()
    try:
        answer = http.post("/v1/completions", json={"prompt": "a", "n": 1_000_000, "logprobs": 1, "stream": stream})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert "n is too large" in answer.json()["error"]["message"]
    assert peak_bytes < 10_000_000


# The bytes of 京, of which the last token has the character, and a special token.
OF_BYTES = [
    [{0xE4: Logprob(-0.1, 1, ""), 0xC3: Logprob(-1.0, 2, "")}],
    [{0xBA: Logprob(-0.2, 1, ""), 256: Logprob(-1.0, 2, ""), 257: Logprob(-2.0, 3, "")}],
    [{0xAC: Logprob(-0.3, 2, "京"), 98: Logprob(-0.1, 1, "\ufffdb")}],
]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_parts_of_a_character_are_written_as_their_bytes(
    stream: bool, client: openai.OpenAI, pool: ScriptedPool
) -> None:
    pool.script = Script(("", "", "京"), logprobs=OF_BYTES)
    found: Any = client.completions.create(model="dflash", prompt="a", logprobs=3, stream=stream)
    written = [choice.logprobs for chunk in (found if stream else [found]) for choice in chunk.choices]
    written = [each for each in written if each]
    assert [token for each in written for token in each.tokens] == [r"bytes:\xe4", r"bytes:\xba", r"bytes:\xac"]
    assert [top for each in written for top in each.top_logprobs] == [
        {r"bytes:\xe4": -0.1, r"bytes:\xc3": -1.0},
        {r"bytes:\xba": -0.2, "</s>": -1.0, "<s>": -2.0},
        {"b": -0.1, r"bytes:\xac": -0.3},
    ]
    assert [offset for each in written for offset in each.text_offset] == [0, 0, 0]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    asked: Any = client.chat.completions.create(model="dflash", stream=stream, **chat)
    entries = [
        entry
        for chunk in (asked if stream else [asked])
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.bytes for entry in entries] == [[0xE4], [0xBA], [0xAC]]
    assert [top.bytes for top in entries[2].top_logprobs] == [[98], [0xAC]]
    assert [top.token for top in entries[0].top_logprobs] == [r"bytes:\xe4", r"bytes:\xc3"]


def test_the_chosen_token_is_among_the_likeliest_and_no_token_is_lost(http: TestClient, pool: ScriptedPool) -> None:
    pool.script = Script(
        ("a",), logprobs=[[{97: Logprob(-3.0, 9, "a"), 98: Logprob(-0.1, 1, "a"), 99: Logprob(-1, 2, "c")}]]
    )
    for asked, expected in (
        (0, {"a": -3.0}),
        (1, {"token_id:98": -0.1, "a": -3.0}),
        (2, {"token_id:98": -0.1, "c": -1, "a": -3.0}),
    ):
        (choice,) = http.post("/v1/completions", json={"prompt": "a", "logprobs": asked}).json()["choices"]
        assert choice["logprobs"]["top_logprobs"] == [expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_stopped_an_answer_is_told(path: str, stream: bool, http: TestClient, pool: ScriptedPool) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    for reason in ("END", 7, None):
        pool.script = Script(stop_reason=reason)
        answer = http.post(path, json={**body, "stream": stream, "stop": ["END"]})
        lines = [line[6:] for line in answer.text.splitlines() if line[:7] == "data: {"] if stream else [answer.text]
        events = [json.loads(line) for line in lines]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["stop_reason"] == reason
        assert all("stop_reason" not in choice for choice in choices[:-1])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_each_choice_of_a_stream_ends_once(
    path: str, fields: dict[str, Any], more: dict[str, Any], n: int, http: TestClient, pool: ScriptedPool
) -> None:
    pool.script = Script(stats_apart=True)
    asked = {**fields, **more, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(path, json=asked).text.removesuffix("data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in answer.split("\n\n") if event]
    choices = [choice for event in events for choice in event["choices"]]
    num_choices = n * (2 if isinstance(fields.get("prompt"), list) else 1)
    ends = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(ends) == list(range(num_choices))
    # Nothing of a choice comes after its end.
    for index in range(num_choices):
        assert [c["finish_reason"] for c in choices if c["index"] == index][-1] == "stop"
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_of_a_transfer_go_to_the_server_and_come_back(
    path: str, http: TestClient, pool: ScriptedPool
) -> None:
    given = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_port": None}
    kept = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_port": 7000, "remote_block_ids": [3, 4]}
    pool.script = Script(kv_transfer_params=kept)
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(path, json={**prompt, "max_tokens": 1, "kv_transfer_params": given}).json()
    assert pool.asked[0].sampling["kv_transfer_params"] == given
    assert answer["kv_transfer_params"] == kept


def test_what_has_nothing_to_say_is_null_as_vllm_writes_it(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a"}).json()
    nulls = ("service_tier", "system_fingerprint", "kv_transfer_params")
    assert [answer.get(name, "missing") for name in nulls] == [None] * 3
    (choice,) = answer["choices"]
    nulls = ("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    assert [choice.get(name, "missing") for name in nulls] == [None] * 5
