"""`Stream` and `AsyncStream`: the deltas of one request, as an iterator that can be cancelled. Made by the clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from types import TracebackType

from dflash_client.errors import ClientError, cancelled_here
from dflash_client.request import Request
from dflash_client.responses import ResponseReader
from dflash_client.results import Delta
from dflash_client.retry import RetryPolicy
from dflash_client.transport import AsyncCall, AsyncTransport, Call, Transport


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stream is to do: send `request`, for `timeout_s` in all, again where `retry` says so."""

    request: Request
    timeout_s: float
    retry: RetryPolicy


class _Running:
    """The state that a stream shares with the generator behind it. The generator must not hold the stream itself: a
    stream that is dropped is to be collected at once, which cancels its request."""

    def __init__(self, plan: Plan, cancelled: threading.Event | asyncio.Event) -> None:
        self.plan = plan
        self.cancelled = cancelled
        self.call: Call | AsyncCall | None = None

    def begin(self, call: Call | AsyncCall) -> None:
        """Take note of the call of the next attempt. Raises `Cancelled` when the stream was cancelled before."""
        self.call = call
        if self.cancelled.is_set():
            raise cancelled_here()

    def cancel(self) -> None:
        """Cancel what runs and what would come. `begin` sets the call and then looks at the flag, this is the other way
        round, so that one of the two sees the other."""
        self.cancelled.set()
        if self.call is not None:
            self.call.cancel()


class Stream:
    """An iterator over the deltas of one request; the request is sent, and its time-out begins, with the first `next`.

    `close`, the end of a `with` block, and dropping the stream cancel the request if it still runs. `cancel` does so
    from any thread: a thread that waits for the next delta gets `Cancelled`. `next` raises `ClientError`, also after
    some deltas.
    """

    def __init__(self, transport: Transport, plan: Plan) -> None:
        cancelled = threading.Event()
        self._running = _Running(plan, cancelled)
        self._deltas = _deltas(transport, self._running, cancelled)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def cancel(self) -> None:
        """Cancel the request. Does nothing when it has ended."""
        self._running.cancel()

    def close(self) -> None:
        """As `cancel`; and there are no more deltas."""
        self._running.cancel()
        # Where another thread waits for a delta, that thread ends the generator.
        with contextlib.suppress(ValueError):
            self._deltas.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _deltas(transport: Transport, running: _Running, cancelled: threading.Event) -> Generator[Delta, None, None]:
    plan = running.plan
    deadline = time.monotonic() + plan.timeout_s
    for attempt in itertools.count():
        reader = ResponseReader()
        call = transport.call(plan.request, deadline)
        try:
            running.begin(call)
            with contextlib.closing(call.responses()) as responses:
                for outputs in responses:
                    yield from reader.deltas(outputs)
            return
        except ClientError as error:
            wait_s = plan.retry.wait_s(attempt, error, reader.answered, deadline - time.monotonic())
            if wait_s is None:
                raise
        finally:
            call.cancel()
        # After a cancellation the next turn raises.
        cancelled.wait(wait_s)


class AsyncStream:
    """As `Stream`, for `async for` and `async with`, in one event loop. Cancelling the task that waits for a delta
    cancels the request too."""

    def __init__(self, transport: AsyncTransport, plan: Plan) -> None:
        cancelled = asyncio.Event()
        self._running = _Running(plan, cancelled)
        self._deltas = _async_deltas(transport, self._running, cancelled)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    def cancel(self) -> None:
        """Cancel the request. Whoever waits for its next delta gets `Cancelled`. Does nothing when it has ended."""
        self._running.cancel()

    async def aclose(self) -> None:
        """As `cancel`; and there are no more deltas."""
        self._running.cancel()
        # Where another task waits for a delta, that task ends the generator.
        with contextlib.suppress(RuntimeError):
            await self._deltas.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


async def _async_deltas(
    transport: AsyncTransport, running: _Running, cancelled: asyncio.Event
) -> AsyncGenerator[Delta, None]:
    plan = running.plan
    deadline = time.monotonic() + plan.timeout_s
    for attempt in itertools.count():
        reader = ResponseReader()
        call = transport.call(plan.request, deadline)
        try:
            running.begin(call)
            async with contextlib.aclosing(call.responses()) as responses:
                async for outputs in responses:
                    for delta in reader.deltas(outputs):
                        yield delta
            return
        except ClientError as error:
            wait_s = plan.retry.wait_s(attempt, error, reader.answered, deadline - time.monotonic())
            if wait_s is None:
                raise
        finally:
            call.cancel()
        # After a cancellation the next turn raises.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(cancelled.wait(), wait_s)
