"""Sends random requests to every endpoint, whole and streamed, and counts the answers by status.

`python -m checks.random_requests --requests 1000` starts a server of its own with the demo pair, or sends to
`--url` and `--triton-url`. Each body is sent in one piece and, where the endpoint has streams, as a stream. No answer
may be a server error (but Triton's own 500 for JSON that it cannot read), none may take longer than a minute, a stream
must end as its API has it, and what a stream brings must be what the whole answer has: texts, calls, reasons,
log-probabilities (but for what a batch changes in their last digits), token ids, counts of tokens, and errors. Exit
status 1 when any of that fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import httpx
import hypothesis
from hypothesis import HealthCheck, given, settings

from checks.front_end import HOST, running_front_end
from checks.malformed import TRITONS_OWN_500
from checks.random_bodies import GENERATE, PATHS, bodies, changed_bodies
from dflash_openai.anthropic_request import arguments_of

TIMEOUT_S = 60.0
THREADS = 4
SETTINGS = {"max_num_seqs": "8", "max_model_len": "512", "kv_cache_gb": "0.2"}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations", GENERATE)
# Names that are made up for each answer.
_MADE_UP = ("id", "call_id")

Fields = dict[str, Any]


class Miss(AssertionError):
    """What was sent, and the answer, which is not the one that it must get."""


class Answered(Protocol):
    """An answer of httpx's or of Starlette's test client."""

    status_code: int

    @property
    def text(self) -> str: ...


# Sends a body to a path, and returns the answer.
Post = Callable[[str, bytes], Answered]


def try_body(post: Post, path: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Send a body, whole and as a stream; yields how each was answered. Raises `Miss`."""
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    answer = _post(post, path, whole)
    _check_status(path, whole, answer)
    yield str(answer.status_code)
    if path not in STREAMED:
        return
    streamed = {**whole, "stream": True, **_stream_options(path, body)}
    stream = _post(post, path + "_stream" if path == GENERATE else path, streamed)
    _check_status(path, streamed, stream)
    wanted = _outcome(path, answer, lambda: WHOLE[_form(path, body)](json.loads(answer.text)))
    try:
        found = _outcome(path, stream, lambda: JOINED[_form(path, body)](list(_events(stream.text))))
    except (KeyError, IndexError, TypeError, AssertionError) as error:
        raise Miss(
            f"{path} {json.dumps(streamed)} -> a stream that cannot be read: {error!r}\n{stream.text}"
        ) from error
    if answer.status_code in (200, 400) and stream.status_code == 400 and "stream" in found["error"]:
        yield "stream refused"
    elif not _same(found, wanted):
        raise Miss(f"{path}: streamed\n{found}\nwhole\n{wanted}\n{json.dumps(streamed)}")
    else:
        yield "streamed as whole" if stream.status_code == 200 else f"streamed {stream.status_code}"


def _stream_options(path: str, body: Mapping[str, Any]) -> Fields:
    """Those of a body; counts of tokens are asked for, to compare them."""
    if path in (GENERATE, "/v1/messages"):
        return {}
    given = body.get("stream_options")
    # The whole request has none of them, so what no JSON may have would be refused of the stream alone.
    options = given if isinstance(given, dict) and _is_unicode(given) else {}
    return {"stream_options": {**options, "include_usage": True}}


def _is_unicode(value: object) -> bool:
    """Whether UTF-8 has all of its texts: not half a surrogate pair."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


def _post(post: Post, path: str, body: Mapping[str, Any]) -> Answered:
    try:
        return post(path, json.dumps(body).encode())
    except httpx.HTTPError as error:
        raise Miss(f"{path}: {error!r} {json.dumps(body)}") from error


def _check_status(path: str, body: Mapping[str, Any], answer: Answered) -> None:
    if answer.status_code in (200, 400, 404):
        return
    if path == GENERATE and answer.status_code == 500 and _error(json.loads(answer.text)).startswith(TRITONS_OWN_500):
        return
    raise Miss(f"{path}: {answer.status_code} {answer.text[:500]} to {json.dumps(body)}")


def _outcome(path: str, answer: Answered, read: Callable[[], Any]) -> Any:
    """What an answer says, or its error."""
    if answer.status_code != 200:
        text = answer.text.removeprefix("data: ") if path == GENERATE else answer.text
        return {"error": _error(json.loads(text))}
    return read()


def _error(answer: Mapping[str, Any]) -> str:
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def _form(path: str, body: Mapping[str, Any]) -> str:
    if path == "/invocations":
        return "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return path


def _events(text: str) -> Iterator[Any]:
    # U+2028 and its like end no line of a stream.
    for line in text.split("\n"):
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def _plain(value: Any) -> Any:
    """A value without the names that are made up."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in _MADE_UP}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _same(found: Any, wanted: Any) -> bool:
    """Whether two values are the same; log-probabilities depend on the batch in their last digits."""
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-3, abs_tol=1e-3)
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[name], wanted[name]) for name in found)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return bool(found == wanted)


def _counts(usage: Mapping[str, Any]) -> list[Any]:
    details = usage.get("completion_tokens_details") or {}
    return [usage["prompt_tokens"], usage["completion_tokens"], details.get("reasoning_tokens")]


class _Choices:
    """The choices of a chat or of completions, from an answer or from the events of a stream."""

    def __init__(self) -> None:
        self.by_index: dict[int, Fields] = {}
        self.usage: list[Any] | None = None
        self.error: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """More of a choice, or all of it."""
        own = self.by_index.setdefault(choice["index"], {"content": None, "reasoning": "", "calls": [], "ends": []})
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        if message.get("content") is not None:
            own["content"] = (own["content"] or "") + message["content"]
        own["reasoning"] += message.get("reasoning") or ""
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            if "name" in function:
                assert call.get("index", place) == len(own["calls"])
                own["calls"].append([function["name"], ""])
            own["calls"][call.get("index", place)][1] += function["arguments"]
        if choice["finish_reason"] is not None:
            own["ends"].append([choice["finish_reason"], choice.get("stop_reason")])
        for name, values in (choice.get("logprobs") or {}).items():
            own.setdefault(f"logprobs {name}", []).extend(values or ())
        own.setdefault("token_ids", []).extend(choice.get("token_ids") or ())

    def told(self) -> Fields:
        """All of it."""
        if self.error is not None:
            return {"error": self.error}
        assert all(len(choice["ends"]) == 1 for choice in self.by_index.values()), "a choice does not end once"
        return {"choices": self.by_index, "usage": self.usage}


def _whole_choices(answer: Mapping[str, Any]) -> Any:
    choices = _Choices()
    for choice in answer["choices"]:
        choices.add(choice)
    choices.usage = _counts(answer["usage"])
    return choices.told()


def _joined_choices(events: list[Any]) -> Any:
    choices = _Choices()
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        if "error" in event:
            choices.error = _error(event)
            continue
        for choice in event["choices"]:
            choices.add(choice)
        if event.get("usage"):
            choices.usage = _counts(event["usage"])
    return choices.told()


def _whole_response(answer: Mapping[str, Any]) -> Any:
    names = ("status", "output", "incomplete_details", "text", "tools", "temperature")
    counts = [answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]]
    return _plain({"usage": counts, **{name: answer[name] for name in names}})


def _joined_response(events: list[Any]) -> Any:
    texts: dict[int, str] = {}
    for event in events[:-1]:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            texts[place] = texts.get(place, "") + event["delta"]
    last = events[-1]
    if last["type"] == "response.failed":
        return {"error": last["response"]["error"]["message"]}
    assert last["type"] == f"response.{last['response']['status']}"
    for place, item in enumerate(last["response"]["output"]):
        texts_of_item = [part["text"] for part in item.get("content", ())] or [item.get("arguments", item.get("input"))]
        assert texts.get(place, "") == texts_of_item[0], f"the deltas of item {place} are not its text"
    return _whole_response(last["response"])


def _whole_message(answer: Mapping[str, Any]) -> Any:
    names = ("content", "stop_reason", "stop_sequence")
    return _plain({"usage": answer["usage"]["output_tokens"], **{name: answer[name] for name in names}})


def _joined_message(events: list[Any]) -> Any:
    blocks: list[Fields] = []
    ended: Fields = {}
    for event in events:
        if event["type"] == "error":
            return {"error": event["error"]["message"]}
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                name = {"partial_json": "json"}.get(name, name)
                if name != "type":
                    blocks[event["index"]][name] += text
        elif event["type"] == "message_delta":
            ended = {"usage": event["usage"], **event["delta"]}
    assert events[-1]["type"] == "message_stop"
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(bytes(arguments_of(given) or b"{}"))
    return _whole_message({"content": blocks, **ended})


def _whole_generate(answer: Mapping[str, Any]) -> Any:
    texts, reasons = answer["text_output"], answer.get("finish_reason")
    return {
        "texts": texts if isinstance(texts, list) else [texts],
        "reasons": reasons if isinstance(reasons, list) or reasons is None else [reasons],
    }


def _joined_generate(events: list[Any]) -> Any:
    texts: list[str] = []
    reasons: list[Any] | None = None
    for event in events:
        if "error" in event:
            return {"error": _error(event)}
        told = _whole_generate(event)
        texts = [before + more for before, more in zip(texts or [""] * len(told["texts"]), told["texts"], strict=True)]
        reasons = told["reasons"]
    return {"texts": texts, "reasons": reasons}


WHOLE: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": _whole_choices,
    "/v1/completions": _whole_choices,
    "/v1/responses": _whole_response,
    "/v1/messages": _whole_message,
    GENERATE: _whole_generate,
}
JOINED: dict[str, Callable[[list[Any]], Any]] = {
    "/v1/chat/completions": _joined_choices,
    "/v1/completions": _joined_choices,
    "/v1/responses": _joined_response,
    "/v1/messages": _joined_message,
    GENERATE: _joined_generate,
}


def send_many(post: Post, path: str, count: int, seed: int) -> tuple[Counter[str], str | None]:
    """Send bodies of which one place is of another kind, and `count` random ones; how they were answered, and the
    smallest that was answered wrongly."""
    answers: Counter[str] = Counter()
    try:
        for body in changed_bodies(path):
            answers.update(try_body(post, path, body))
    except Miss as miss:
        return answers, str(miss)

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(path))
    def send(body: Any) -> None:
        answers.update(try_body(post, path, body))

    try:
        send()
    except Miss as miss:
        return answers, str(miss)
    return answers, None


@contextmanager
def _servers(url: str | None, triton_url: str | None) -> Iterator[tuple[str, str | None]]:
    if url is not None:
        yield url, triton_url
        return
    with running_front_end(SETTINGS, ["--no-access-log"]) as front_end:
        yield f"http://{HOST}:{front_end.port}", f"http://{front_end.server.http_url}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Random requests to every endpoint, whole and streamed.")
    parser.add_argument("--requests", type=int, default=1000, help="bodies for each endpoint (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, help="some of the endpoints")
    parser.add_argument("--url", help="a front end that runs (one is started)")
    parser.add_argument("--triton-url", help="its server's HTTP address, for generate")
    options = parser.parse_args(arguments)
    misses = []
    with (
        _servers(options.url, options.triton_url) as (url, triton),
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http,
        ThreadPoolExecutor(THREADS) as pool,
    ):

        def post(path: str, body: bytes) -> Answered:
            return http.post(f"{triton if path.startswith(GENERATE) else url}{path}", content=body)

        paths = [path for path in options.paths if path != GENERATE or triton is not None]
        futures = {path: pool.submit(send_many, post, path, options.requests, options.seed) for path in paths}
        for path, future in futures.items():
            answers, miss = future.result()
            print(f"{path}: {', '.join(f'{count} {how}' for how, count in sorted(answers.items()))}", flush=True)
            misses += [] if miss is None else [miss]
    for miss in misses:
        print(f"MISS: {miss}")
    print(f"{len(misses)} endpoints answered wrongly" if misses else "every answer was right")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
