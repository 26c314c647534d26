"""A server and its client: `python -m benchmarks.peers.sides.http_side SETTINGS`.

The client is the same for all: what comes is kept with its time, since a client's own work takes a core from the server
that it measures. Answers are parsed once the run is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.peers.sides.protocol import SEED, Clock, Prompts, Run, serve

HOST = "127.0.0.1"
POLL_S, STOP_S = 0.2, 20.0
LOG_TAIL = 400
HEAD_END = b"\r\n\r\n"
# A chunk's end, and the chunk without a byte.
LAST_CHUNK = b"\r\n0\r\n\r\n"
LOST = -1  # in place of the id of a token that a stream did not show


class Server:
    """The server's processes, which end with this one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._log = Path(settings["log"])
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                settings["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | settings["env"],
                start_new_session=True,
            )

    def wait(self, url: str, timeout_s: float) -> None:
        """Until it answers. Raises `RuntimeError` when it ends or does not."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}: {self._said()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(POLL_S)
        raise RuntimeError(f"the server was not ready within {timeout_s:.0f} s: {self._said()}")

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_TAIL:].strip()

    def stop(self) -> None:
        """First as an operator would, then by force, its children too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def request_body(settings: dict[str, Any], prompt: list[int], max_tokens: int, stream: bool = True) -> bytes:
    """What asks a server of this kind for `max_tokens` tokens, each with its id: greedily, or as the settings say."""
    fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "stream": stream, "ignore_eos": True}
    sampling = settings.get("sampling")
    if sampling:
        # llama.cpp has filters of its own, where none are given.
        fields |= {"seed": SEED, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | sampling
    if settings["api"] == "llama":
        fields |= {"n_predict": max_tokens, "return_tokens": True, "cache_prompt": False}
    else:
        fields |= {"model": settings["model"], "max_tokens": max_tokens, "return_token_ids": True}
    return json.dumps(fields).encode()


def event_tokens(event: dict[str, Any], api: str, num_before: int = 0) -> list[int]:
    """The new tokens of an event, behind `num_before` of the events before it. Raises `RuntimeError` for an error."""
    if "error" in event:
        raise RuntimeError(f"the server answered {event['error']}")
    if api == "llama":
        tokens = list(event.get("tokens") or ())
        # The last event counts all tokens; of those that end within a character there were no ids.
        num_lost = event.get("tokens_predicted", 0) - num_before - len(tokens) if event.get("stop") else 0
        return tokens + [LOST] * max(0, num_lost)
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]


class _Answer(asyncio.Protocol):
    """A connection with one request. `received` has what came, and when."""

    def __init__(self, request: bytes) -> None:
        self._request, self._is_stream = request, False
        self.received: list[tuple[bytes, float]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received.append((data, time.perf_counter()))
        if self._is_whole(data):
            self._transport.close()
            self._end()

    def _is_whole(self, data: bytes) -> bool:
        """Whether the answer, with `data` as its end, has its last chunk or, where it is an error, all that its head
        says."""
        if self._is_stream:
            few = len(data) < len(LAST_CHUNK)
            end = b"".join([each for each, _ in self.received[-len(LAST_CHUNK) :]]) if few else data
            return end.endswith(LAST_CHUNK)
        head, end_of_head, body = b"".join([each for each, _ in self.received]).partition(HEAD_END)
        self._is_stream = bool(end_of_head) and b" 200 " in head.partition(b"\r\n")[0]
        if self._is_stream:
            return self._is_whole(data)
        return bool(end_of_head) and len(body) >= _content_length(head)

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _content_length(head: bytes) -> int:
    fields = (line.lower().partition(b":") for line in head.split(b"\r\n"))
    return next((int(value) for name, _, value in fields if name == b"content-length"), 0)


def answer_parts(received: list[tuple[bytes, float]]) -> list[tuple[bytes, float]]:
    """The chunks of an answer, each with the time at which it had come. Raises `RuntimeError` where it is an error, or
    has no end."""
    data, ends = b"".join([data for data, _ in received]), list(accumulate(len(data) for data, _ in received))
    if not data:
        raise RuntimeError("the server closed the connection without an answer")
    head, _, body = data.partition(HEAD_END)
    status = head.partition(b"\r\n")[0]
    if b" 200 " not in status:
        text = body[: _content_length(head)].decode(errors="replace")
        raise RuntimeError(f"the server answered {status.decode()} {text[:LOG_TAIL]}")
    parts, at = [], len(head) + len(HEAD_END)
    while (line_end := data.find(b"\r\n", at)) >= 0 and (size := int(data[at:line_end], 16)):
        begin, at = line_end + 2, line_end + 2 + size + 2
        if at > len(data):
            break
        parts.append((data[begin : at - 2], received[bisect_left(ends, at)][1]))
    if line_end < 0 or at > len(data):
        raise RuntimeError("the server closed the connection in the midst of an answer")
    return parts


async def _run(settings: dict[str, Any], prompts: Prompts, streams: int, max_tokens: int) -> dict[str, Any]:
    todo, clock = iter(enumerate(prompts)), Clock(len(prompts))
    received: dict[int, list[tuple[bytes, float]]] = {}
    loop = asyncio.get_running_loop()
    head = f"POST {settings['path']} HTTP/1.1\r\nhost: {HOST}:{settings['port']}\r\ncontent-type: application/json\r\n"

    async def stream() -> None:
        for index, prompt in todo:
            body = request_body(settings, prompt, max_tokens)
            clock.sent(index)
            request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            # A connection each: some servers close theirs after an answer.
            _, answer = await loop.create_connection(partial(_Answer, request), HOST, settings["port"])
            await answer.ended
            received[index] = answer.received

    started = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.perf_counter() - started
    for index in sorted(received):
        num_tokens = 0
        for event, now in events(answer_parts(received[index])):
            tokens = event_tokens(event, settings["api"], num_tokens)
            num_tokens += len(tokens)
            clock.arrived(index, tokens, now)
    return clock.result(seconds=seconds)


def events(parts: list[tuple[bytes, float]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Server-sent events, each with the time at which its last byte had come."""
    rest = b""
    for part, now in parts:
        *whole, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: ")), now


def main() -> None:
    """Start the server, answer, stop it."""
    servers: list[Server] = []

    def load(settings: dict[str, Any]) -> tuple[str, Run]:
        servers.append(Server(settings))
        servers[0].wait(f"http://{HOST}:{settings['port']}{settings['health']}", settings["load_timeout_s"])
        return settings["version"], lambda *asked: asyncio.run(_run(settings, *asked))

    # Ended by a signal it would leave the server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(load)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
