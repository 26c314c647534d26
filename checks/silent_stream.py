"""Streams that are silent for a minute, through a proxy that gives up what sends nothing for 15 seconds.

`python -m checks.silent_stream --silent 60 --read-timeout 15`. The front end runs as a process of its own, before a
stand-in of its model that says nothing for `--silent` seconds before its first token and as long after it. The exit
status is 0 when each endpoint's stream comes through whole, and when without comments (`--ping-interval 0`) none does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from checks.front_end import HOST
from dflash_cli.launcher.ports import settle_ports

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "stream": True},
    "/v1/completions": {"prompt": "a", "stream": True},
    "/v1/responses": {"input": "a", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": True},
}


@asynccontextmanager
async def proxy(port: int, read_timeout_s: float) -> AsyncGenerator[int, None]:
    """The port of a proxy to `port`, which ends a connection whose server has sent nothing for `read_timeout_s`."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float | None) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            while data := await asyncio.wait_for(reader.read(65536), timeout_s):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(HOST, port)
        # At the end of the proxy: a task that ends so is told of as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(pump(reader, to_server, None), pump(from_server, writer, read_timeout_s))

    server = await asyncio.start_server(connected, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextmanager
def silent_front_end(silent_s: float, ping_interval_s: float) -> Iterator[int]:
    """The port of a front end whose model says nothing for `silent_s` before each of its tokens."""
    port = settle_ports(HOST, {"--port": 0})["--port"]
    command = [sys.executable, "-m", "tests.frontend.scripted_server", str(port), "--no-access-log"]
    command += ["--ping-interval", str(ping_interval_s), "--silent", str(silent_s)]
    process = subprocess.Popen(command, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{HOST}:{port}/v1/models", trust_env=False).is_success:
                    break
            if time.monotonic() > deadline:
                raise RuntimeError("the front end is not ready")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(30)


async def read(port: int, path: str) -> str:
    """What comes of a stream, as far as it comes."""
    text = ""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=None) as http:
        with contextlib.suppress(httpx.TransportError):
            async with http.stream("POST", path, json=STREAMS[path]) as answer:
                async for piece in answer.aiter_text():
                    text += piece
    return text


def is_whole(text: str) -> bool:
    """Whether a stream has reached its end."""
    return text.endswith("data: [DONE]\n\n") or "event: response.completed" in text or "event: message_stop" in text


def run(silent_s: float, read_timeout_s: float, ping_interval_s: float) -> dict[str, tuple[bool, int, float]]:
    """By endpoint: whether the stream came whole, how many comments it had, and for how long it ran."""

    async def one(port: int, path: str) -> tuple[bool, int, float]:
        began = time.monotonic()
        text = await read(port, path)
        return is_whole(text), text.count(": ping\n"), time.monotonic() - began

    async def all_of(port: int) -> dict[str, tuple[bool, int, float]]:
        async with proxy(port, read_timeout_s) as through:
            results = await asyncio.gather(*(one(through, path) for path in STREAMS))
        return dict(zip(STREAMS, results, strict=True))

    with silent_front_end(silent_s, ping_interval_s) as port:
        return asyncio.run(all_of(port))


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silent", type=float, default=60.0, metavar="S", help="%(default)g")
    parser.add_argument("--read-timeout", type=float, default=15.0, metavar="S", help="of the proxy (%(default)g)")
    parser.add_argument("--ping-interval", type=float, default=10.0, metavar="S", help="of the front end (%(default)g)")
    given = parser.parse_args(arguments)
    kept = True
    for interval_s in (given.ping_interval, 0.0):
        for path, (whole, pings, took) in run(given.silent, given.read_timeout, interval_s).items():
            kept = kept and whole == bool(interval_s)
            how = "whole" if whole else "cut"
            print(f"comments each {interval_s:g} s, {path}: {how} after {took:.1f} s, {pings} comments", flush=True)
    print("kept" if kept else "MISSED", flush=True)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
