"""A Triton server with the demo pair and an OpenAI front end before it, for checks, and clients of that front end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.server import TritonServer
from load_tests.server_state import MetricsPage, memory_mib, resident_bytes

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RunningFrontEnd:
    """A front end at `port` and its server."""

    server: TritonServer
    process: FrontendProcess
    port: int

    @property
    def metrics(self) -> MetricsPage:
        """Triton's metrics as they are now."""
        return MetricsPage.read(self.server.metrics_url)

    def memory_mib(self) -> dict[str, float]:
        """Resident memory by process."""
        process = psutil.Process(self.process.pid)
        of_front_end = resident_bytes([process, *process.children(recursive=True)]) / 2**20
        return {**memory_mib(self.server.pid), "front end": of_front_end}

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any], key: str | None = None
    ) -> AsyncIterator[asyncio.StreamReader]:
        """What the server sends to a request, headers and all; the connection is closed at the end."""
        reader, writer = await self.connect()
        try:
            writer.write(request_bytes(path, body, key))
            await writer.drain()
            yield reader
        finally:
            writer.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which nothing was sent."""
        return await asyncio.open_connection(HOST, self.port)

    async def first_token_s(self, prompt: str, key: str | None = None, max_tokens: int = 4) -> tuple[float, str]:
        """Seconds from a request to the first event of its stream that has text, and the whole text."""
        began = time.monotonic()
        first_s, text = None, ""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        async with asyncio.timeout(TIMEOUT_S), self.post("/v1/completions", body, key) as reader:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2000)).decode()}")
            async for event in events(reader):
                piece = "".join(choice["text"] for choice in event["choices"])
                if piece and first_s is None:
                    first_s = time.monotonic() - began
                text += piece
        if first_s is None:
            raise RuntimeError("the stream had no text")
        return first_s, text


def request_bytes(path: str, body: Mapping[str, Any], key: str | None = None) -> bytes:
    """A request as it travels."""
    content = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n{authorization}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, until it is done."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])


@contextmanager
def running_front_end(
    settings: Mapping[str, str], options: Sequence[str] = (), keys: str | None = None
) -> Iterator[RunningFrontEnd]:
    """Start both; `keys` are lines of a key file."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    with TritonServer(dict(settings), host=HOST, http_port=0, grpc_port=0, metrics_port=0, environ=environ) as server:
        port = settle_ports(HOST, {"--port": 0})["--port"]
        if keys is not None:
            environ["DFLASH_API_KEYS"] = keys
        process = FrontendProcess(HOST, port, options, environ)
        process.launch(server.grpc_url, server.metrics_url)
        process.start()
        try:
            yield RunningFrontEnd(server, process, port)
        finally:
            process.stop()
