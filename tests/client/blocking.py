"""`AsyncDFlashClient` with the methods of `DFlashClient`, so that one set of tests holds for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from dflash_client import AsyncDFlashClient, AsyncStream, ClientError, Delta, GenerationResult

T = TypeVar("T")


class BlockingClient:
    """An `AsyncDFlashClient` whose event loop runs in a thread of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make() -> AsyncDFlashClient:
            return AsyncDFlashClient(*args, **options)

        self._client = self.run(make())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **options: Any) -> GenerationResult:
        return self.run(self._client.generate(*args, **options))

    def stream(self, *args: Any, **options: Any) -> BlockingStream:
        return BlockingStream(self, self._client.stream(*args, **options))

    def ready(self) -> bool:
        return self.run(self._client.ready())

    def probe(self, *args: Any) -> ClientError | None:
        return self.run(self._client.probe(*args))

    def wait_ready(self, timeout_s: float) -> None:
        self.run(self._client.wait_ready(timeout_s))

    def call_soon(self, work: Any) -> None:
        """Call a function in the thread of the loop."""
        self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        self.run(self._client.close())

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingStream:
    """An `AsyncStream` as an iterator."""

    def __init__(self, client: BlockingClient, stream: AsyncStream) -> None:
        self._client, self._stream = client, stream

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Delta:
        async def following() -> Delta | None:
            return await anext(self._stream, None)

        delta = self._client.run(following())
        if delta is None:
            raise StopIteration
        return delta

    def cancel(self) -> None:
        self._client.call_soon(self._stream.cancel)

    def close(self) -> None:
        self._client.run(self._stream.aclose())
