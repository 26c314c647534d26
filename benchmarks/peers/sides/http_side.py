"""A server and its client: `python -m benchmarks.peers.sides.http_side SETTINGS`.

The client is the same for all: sockets read as they are, since a client's own work takes a core from the server that it
measures. Answers are parsed once the run is over.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.sides.protocol import Clock, Prompts, Run, serve

HOST = "127.0.0.1"
POLL_S, STOP_S, LIMIT = 0.2, 20.0, 1 << 24
LOG_TAIL = 400
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
    """What asks a server of this kind for `max_tokens` tokens, greedily, each with its id."""
    fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "stream": stream, "ignore_eos": True}
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


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, body: bytes) -> list[Any]:
    """The parts of an answer, each with the time at which it had come."""
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    fields = []
    while line := (await reader.readline()).strip():
        fields.append(line.lower())
    if not status:
        raise RuntimeError("the server closed the connection without an answer")
    if b" 200 " not in status:
        length = next((int(f.split(b":")[1]) for f in fields if f.startswith(b"content-length:")), 0)
        text = (await reader.readexactly(length)).decode(errors="replace")
        raise RuntimeError(f"the server answered {status.decode().strip()} {text[:LOG_TAIL]}")
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(((await reader.readexactly(size + 2))[:-2], time.perf_counter()))
    await reader.readline()
    return parts


async def _run(settings: dict[str, Any], prompts: Prompts, streams: int, max_tokens: int) -> dict[str, Any]:
    todo, clock = iter(enumerate(prompts)), Clock(len(prompts))
    parts: dict[int, list[tuple[bytes, float]]] = {}
    head = f"POST {settings['path']} HTTP/1.1\r\nhost: {HOST}:{settings['port']}\r\ncontent-type: application/json\r\n"

    async def stream() -> None:
        for index, prompt in todo:
            body = request_body(settings, prompt, max_tokens)
            clock.sent(index)
            # A connection each: some servers close theirs after an answer.
            reader, writer = await asyncio.open_connection(HOST, settings["port"], limit=LIMIT)
            parts[index] = await _ask(reader, writer, head, body)
            writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds = time.perf_counter() - started
    for index in sorted(parts):
        num_tokens = 0
        for event, now in events(parts[index]):
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
