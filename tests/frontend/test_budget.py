"""What one HTTP request may ask for in all, and that reading and writing large bodies keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from starlette.testclient import TestClient

from checks import event_loop
from dflash_client import Delta
from dflash_client.errors import Internal
from dflash_client.responses import LARGE_CHARS, ResponseReader
from dflash_client.results import GenerationResult, Logprob
from dflash_openai import answers, bodies, schemas
from dflash_openai.answers import let_go
from dflash_openai.app import create_app
from dflash_openai.bodies import (
    BYTES_A_CALL,
    ITEMS_A_CALL,
    MAX_KEYS,
    MAX_VALUES,
    PiecesResponse,
    check_parts,
    encoded,
)
from dflash_openai.budget import BYTES_OF_LOGPROB, BYTES_OF_TOKEN, check_asked
from dflash_openai.config import FrontendConfig
from dflash_openai.errors import ApiError
from dflash_openai.state import LARGE_ANSWER_BYTES, LOOKS_AT_YOUNG, NUM_THREADS, SWITCH_S, Frontend
from dflash_openai.triton_pool import ModelDescription
from tests.frontend.conftest import wait_until_ready
from tests.frontend.scripted_pool import Script, ScriptedPool

ENTRY = {1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}


@pytest.fixture(scope="module")
def narrow(model_dir: Path) -> Iterator[tuple[ScriptedPool, TestClient]]:
    """A front end whose model allows answers of 20 kB and 300 waiting tokens."""
    pool = ScriptedPool(model_dir)
    pool.description = msgspec.structs.replace(pool.description, max_response_mb=0.02, max_queue_tokens=300)
    with TestClient(create_app(FrontendConfig(), pool), raise_server_exceptions=False) as http:
        wait_until_ready(http)
        yield pool, http


def refusal(narrow: tuple[ScriptedPool, TestClient], path: str = "/v1/completions", **body: Any) -> str:
    """The message of the 400 that a body gets, of which the model sees nothing."""
    pool, http = narrow
    pool.asked.clear()
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert pool.asked == []
    return str(answer.json()["error"]["message"])


def test_prompts_times_log_probabilities_are_refused_before_anything_is_sent(
    narrow: tuple[ScriptedPool, TestClient],
) -> None:
    message = refusal(narrow, prompt=[[7] * 20] * 5, max_tokens=1, prompt_logprobs=2)
    assert "100 tokens of 5 prompts x 3 log-probabilities x 70 bytes + 5 tokens of 5 prompts x 1 answers" in message
    assert "allowed: 0.02 MB (max_response_mb)" in message
    message = refusal(narrow, prompt=["a"] * 5, max_tokens=20, logprobs=2, n=2)
    assert "200 tokens of 5 prompts x 2 answers with 3 log-probabilities each x 214 bytes" in message
    message = refusal(narrow, prompt=["a"] * 5, max_tokens=20, logprobs=0, logprob_token_ids=[5, 6, 7], n=2)
    assert "x 2 answers with 4 log-probabilities each x 284 bytes" in message
    assert "x 3 log-probabilities" in refusal(narrow, prompt=[[7] * 20] * 5, max_tokens=0, echo=True, logprobs=2)


def test_the_tokens_of_all_prompts_together_are_bounded(narrow: tuple[ScriptedPool, TestClient]) -> None:
    for prompt in ([[7] * 101] * 3, ["a" * 101] * 3):
        message = refusal(narrow, prompt=prompt, max_tokens=1)
        assert "the 3 prompts have more than 300 tokens together; allowed: max_queue_tokens (300)" in message
    _, http = narrow
    assert http.post("/v1/completions", json={"prompt": [[7] * 100] * 3, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(("prompts", "n"), [(1, 2), (2, 1), (3, 4)])
def test_the_budget_is_that_of_one_answer(prompts: int, n: int) -> None:
    most = prompts * n * 10 * (BYTES_OF_TOKEN + 3 * BYTES_OF_LOGPROB)
    sampling = {"n": n, "logprobs": 2}
    description = ModelDescription(100, 100, 0, 8, "x", max_response_mb=most / 1e6)
    check_asked([5] * prompts, [10] * prompts, sampling, description)
    with pytest.raises(ApiError, match="max_response_mb"):
        check_asked([5] * prompts, [10] * (prompts - 1) + [11], sampling, description)


def test_a_single_answer_is_counted_as_it_comes(narrow: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = narrow
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    pool.script = Script(texts=("a",) * 100, logprobs=[[ENTRY]] * 100)
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    pool.script = Script(texts=("a",) * 150, logprobs=[[ENTRY]] * 150)
    pool.asked.clear()
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "the answers have grown past max_response_mb (0.02 MB) together" in answer.json()["error"]["message"]
    assert [one.cancelled for one in pool.asked] == [True]
    # What is sent as it comes is not kept.
    assert http.post("/v1/chat/completions", json=body | {"stream": True}).text.endswith("[DONE]\n\n")


def test_all_answers_of_a_request_count_together(narrow: tuple[ScriptedPool, TestClient]) -> None:
    pool, http = narrow
    pool.script = Script(texts=("x" * 1200,))
    for num_prompts, status in ((3, 200), (4, 400)):
        answer = http.post("/v1/completions", json={"prompt": ["a"] * num_prompts})
        assert answer.status_code == status, answer.text[:300]


def test_parameters_are_not_sent_with_a_thousand_prompts(
    narrow: tuple[ScriptedPool, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_openai.budget.MAX_SENT_BYTES", 10_000)
    message = refusal(narrow, prompt=["a"] * 100, max_tokens=1, stop=["x" * 200])
    assert message.startswith("100 prompts x ")
    assert "allowed: 10000" in message


@pytest.mark.parametrize(("sign", "most", "words"), [(":", MAX_KEYS, "keys of objects"), (",", MAX_VALUES, "values")])
def test_keys_and_values_of_a_body_are_bounded_and_strings_do_not_count(sign: str, most: int, words: str) -> None:
    check_parts(b"{" + sign.encode() * most + b"}")
    with pytest.raises(ApiError, match=f"more than {most} {words}"):
        check_parts(b"{" + sign.encode() * (most + 1) + b"}")
    quoted = json.dumps(['\\"' + sign * 7] * (most // 4), separators=("; ", ": "))
    check_parts(quoted.encode())


def test_signs_outside_of_strings_are_found_wherever_a_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_openai.bodies.MAX_VALUES", 40)
    rng = random.Random(1)
    assert BYTES_A_CALL > 7
    monkeypatch.setattr("dflash_openai.bodies.BYTES_A_CALL", 7)
    for _ in range(300):
        value = ["".join(rng.choice(',"\\x') for _ in range(rng.randrange(9))) for _ in range(rng.randrange(30, 55))]
        body = json.dumps(value).encode()
        if len(value) - 1 > 40:
            with pytest.raises(ApiError):
                check_parts(body)
        else:
            check_parts(body)


def test_a_large_body_is_read_and_its_answer_written_in_a_thread(
    narrow: tuple[ScriptedPool, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of the application is that of the first request, which is small."""
    pool, http = narrow
    threads: dict[str, list[int]] = {"read": [], "written": []}

    def noted(kind: str, work: Any) -> Any:
        def called(*given: Any) -> Any:
            threads[kind].append(threading.get_ident())
            return work(*given)

        return called

    monkeypatch.setattr(bodies, "decode", noted("read", schemas.decode))
    monkeypatch.setattr(answers, "let_go", noted("written", answers.let_go))
    pool.script = Script()
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a", "user": "x" * 70_000}).status_code == 200
    monkeypatch.setattr(bodies, "LARGE_BYTES", 3)
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    loop = threads["read"][0]
    assert [one == loop for one in threads["read"]] == [True, False, False]
    assert [one == loop for one in threads["written"]] == [True, True, False]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b": {"c": [{}], "d": ()}, "e": None, "f": 1.5},
        {"a": list(range(3 * ITEMS_A_CALL + 1))},
        {"a": ({"b": list(range(ITEMS_A_CALL))}, {"c": 'x"\n'}), 3: "n"},
        [{"a": position} for position in range(2 * ITEMS_A_CALL + 3)],
        [[1, [2]], "x"],
    ],
)
def test_an_answer_is_encoded_as_in_one_piece(value: Any) -> None:
    expected = msgspec.json.encode(value)
    # What is written is let go.
    within = [encoded({"b": 1}), encoded(copy.deepcopy(value))]
    assert b"".join(encoded({"x": within})) == b'{"x":[{"b":1},' + expected + b"]}"
    many = [encoded(position) for position in range(2 * ITEMS_A_CALL)]
    assert b"".join(encoded({"x": many})) == msgspec.json.encode({"x": list(range(2 * ITEMS_A_CALL))})
    assert b"".join(encoded(value)) == expected


def test_a_large_answer_is_sent_in_bounded_pieces_with_its_length_and_others_get_on_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "BYTES_A_CALL", 5000)
    value = {"a": [{"b": "x" * 90} for _ in range(4 * ITEMS_A_CALL)], "c": ["y" * 90] * 4 * ITEMS_A_CALL}
    text = msgspec.json.encode(value)
    sent: list[Any] = []
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        beside = asyncio.create_task(other())
        await PiecesResponse(encoded(value))({}, cast(Any, None), send)
        beside.cancel()

    asyncio.run(answer())
    head, *parts = sent
    assert (head["status"], dict(head["headers"])[b"content-length"]) == (200, str(len(text)).encode())
    assert b"".join(part["body"] for part in parts) == text
    # One call writes so many items.
    assert max(len(part["body"]) for part in parts) < 5000 + ITEMS_A_CALL * 100
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert turns >= len(parts) - 1 > 5


@pytest.mark.parametrize(
    ("path", "asked", "in_pieces"),
    [
        ("/v1/completions", {"prompt": [7] * 50, "max_tokens": 2, "prompt_logprobs": 1}, True),
        ("/v1/completions", {"prompt": [7] * 49, "max_tokens": 2, "prompt_logprobs": 1}, False),
        ("/v1/completions", {"prompt": [7] * 50, "max_tokens": 2, "logprobs": 1, "echo": True}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 50, "logprobs": 1}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 25, "logprobs": 1, "n": 2}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 49, "logprobs": 1}, False),
        ("/v1/completions", {"prompt": "a", "max_tokens": 60}, False),
    ],
)
def test_an_answer_that_may_be_large_comes_in_pieces(
    narrow: tuple[ScriptedPool, TestClient],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    in_pieces: bool,
) -> None:
    pool, http = narrow
    monkeypatch.setattr("dflash_openai.budget.LARGEST_PIECE_BYTES", 100 * BYTES_OF_LOGPROB - 1)
    pool.script = Script(("h",))
    pool.asked.clear()
    answer = http.post(path, json=asked)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert [one.stream for one in pool.asked] == [in_pieces]


def test_large_work_has_few_threads_which_keep_the_event_loop_waiting_for_a_millisecond_each(
    narrow: tuple[ScriptedPool, TestClient],
) -> None:
    _, http = narrow
    assert http.portal is not None

    async def threads() -> int:
        loop = asyncio.get_running_loop()
        return len(set(await asyncio.gather(*(loop.run_in_executor(None, threading.get_ident) for _ in range(50)))))

    assert http.portal.call(threads) <= NUM_THREADS
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert NUM_THREADS * SWITCH_S < 0.01


def test_the_collector_looks_at_everything_while_no_large_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr("gc.collect", lambda: looks.append(1))
    monkeypatch.setattr("gc.get_count", lambda: (0, 0, LOOKS_AT_YOUNG + 1))
    frontend = Frontend(FrontendConfig(), Mock())
    frontend.running.add(Mock(num_bytes=LARGE_ANSWER_BYTES))
    frontend.collect_garbage()
    assert looks == []
    frontend.running.clear()
    frontend.collect_garbage()
    assert looks == [1]
    monkeypatch.setattr("gc.get_count", lambda: (0, 0, LOOKS_AT_YOUNG))
    frontend.collect_garbage()
    assert looks == [1]


def test_results_are_let_go() -> None:
    of_prompt = tuple({1: Logprob(-0.5)} for _ in range(3 * ITEMS_A_CALL))
    results = [GenerationResult.from_deltas([Delta("a", logprobs=of_prompt, prompt_logprobs=of_prompt)])]
    let_go(results)
    assert results == []


def test_long_log_probabilities_are_read_as_in_one_piece() -> None:
    entries = [None, *({str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "],["}} for token in range(3000))]
    text = json.dumps(entries)
    assert len(text) > LARGE_CHARS
    (delta,) = ResponseReader().deltas({"text_output": ["a"], "prompt_logprobs": [text]})
    assert delta.prompt_logprobs == (None, *({token: Logprob(-0.5, 1, "],[")} for token in range(3000)))
    for broken in (text[:-1], text[:-10]):
        with pytest.raises(Internal, match="'prompt_logprobs' of the server is not JSON"):
            list(ResponseReader().deltas({"text_output": ["a"], "prompt_logprobs": [broken]}))


def test_the_largest_bodies_are_answered_as_they_must_be() -> None:
    """`checks.event_loop` on a small scale; how long others wait is a matter of the machine."""
    names = ("ids, echo", "64 x prompt_logprobs", "logprobs", "metadata", "logit_bias", "kwargs", "tokenize")
    for name, (wanted, status, _, _) in event_loop.run(0.02, 1, names).items():
        assert status == wanted, name
