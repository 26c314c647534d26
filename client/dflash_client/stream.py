"""`Stream` and `AsyncStream`: the deltas of one request, as an iterator that can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from typing import Any

from dflash_client.errors import ClientError, broke_off, cancelled_here
from dflash_client.request import Request
from dflash_client.responses import Outputs, ResponseReader
from dflash_client.results import Delta
from dflash_client.retry import RetryPolicy

# What a stream is to do: send a request, again where the policy says so, and the seconds that it has in all.
Plan = tuple[Request, float, RetryPolicy]


class _Attempts:
    """The attempts of one request, which a stream shares with the generator behind it. The generator must not hold the
    stream itself: a stream that is dropped must be collected at once, which cancels its request. `reader`: reads the
    responses of the attempt that runs."""

    def __init__(self, transport: Any, plan: Plan, cancelled: threading.Event | asyncio.Event) -> None:
        self._transport, self._cancelled = transport, cancelled
        self._request, self._timeout_s, self._retry = plan
        self._deadline: float | None = None
        self._number = -1
        self._call: Any = None
        self.reader = ResponseReader()

    def begin(self) -> Any:
        """The call of the next attempt; the time-out begins with the first. Raises `Cancelled` after `cancel`."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
        self._number += 1
        self.reader = ResponseReader()
        self._call = call = self._transport.call(self._request, self._deadline)
        if self._cancelled.is_set():
            raise cancelled_here()
        return call

    async def async_deltas(self, outputs: Outputs) -> Iterable[Delta]:
        """What is new in a response of this attempt, found in a thread where that takes long."""
        deltas = self.reader.deltas(outputs)
        return await asyncio.to_thread(list, deltas) if self.reader.takes_long(outputs) else deltas

    def check_end(self) -> None:
        """The responses of this attempt have ended. Raises `ConnectionLost` where the answer had not."""
        if self._request.generates and self.reader.broke_off and not self._cancelled.is_set():
            raise broke_off()

    def wait_s(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt. Raises `error` when there is none."""
        assert self._deadline is not None
        remaining_s = self._deadline - time.monotonic()
        wait_s = self._retry.wait_s(self._number, error, self.reader.answered, remaining_s)
        if wait_s is None:
            raise error
        return wait_s

    def cancel(self) -> None:
        """Cancel the call that runs and all to come. `begin` sets the call and then looks at the flag, this is the
        other way round, so that one of the two sees the other."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()


class Stream:
    """An iterator over the deltas of one request; the request is sent, and its time-out begins, with the first `next`.

    `close`, the end of a `with` block, and dropping the stream cancel the request if it still runs. `cancel` does so
    from any thread: a thread that waits for the next delta gets `Cancelled`. `next` raises `ClientError`, also after
    some deltas.
    """

    def __init__(self, transport: Any, plan: Plan) -> None:
        cancelled = threading.Event()
        self._attempts = _Attempts(transport, plan, cancelled)
        self._deltas = _deltas(self._attempts, cancelled)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def cancel(self) -> None:
        """Cancel the request. Does nothing when it has ended."""
        self._attempts.cancel()

    def close(self) -> None:
        """As `cancel`; and there are no more deltas."""
        self._attempts.cancel()
        # Where another thread waits for a delta, that thread ends the generator.
        with contextlib.suppress(ValueError):
            self._deltas.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _deltas(attempts: _Attempts, cancelled: threading.Event) -> Generator[Delta, None, None]:
    while True:
        call = attempts.begin()
        try:
            with contextlib.closing(call.responses()) as responses:
                for outputs in responses:
                    yield from attempts.reader.deltas(outputs)
            attempts.check_end()
            return
        except ClientError as error:
            wait_s = attempts.wait_s(error)
        finally:
            call.cancel()
        # After a cancellation `begin` raises.
        cancelled.wait(wait_s)


class AsyncStream:
    """As `Stream`, for `async for` and `async with`, in one event loop. Cancelling the task that waits for a delta
    cancels the request too."""

    def __init__(self, transport: Any, plan: Plan) -> None:
        cancelled = asyncio.Event()
        self._attempts = _Attempts(transport, plan, cancelled)
        self._deltas = _async_deltas(self._attempts, cancelled)

    def __aiter__(self) -> AsyncStream:
        return self

    def __anext__(self) -> Awaitable[Delta]:
        return self._deltas.__anext__()

    def cancel(self) -> None:
        """Cancel the request. A task that waits for its next delta gets `Cancelled`. Does nothing when it has ended."""
        self._attempts.cancel()

    async def aclose(self) -> None:
        """As `cancel`; and there are no more deltas."""
        self._attempts.cancel()
        # Where another task waits for a delta, that task ends the generator.
        with contextlib.suppress(RuntimeError):
            await self._deltas.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def _async_deltas(attempts: _Attempts, cancelled: asyncio.Event) -> AsyncGenerator[Delta, None]:
    while True:
        call = attempts.begin()
        try:
            async with contextlib.aclosing(call.responses()) as responses:
                async for outputs in responses:
                    for delta in await attempts.async_deltas(outputs):
                        yield delta
            attempts.check_end()
            return
        except ClientError as error:
            wait_s = attempts.wait_s(error)
        finally:
            call.cancel()
        # After a cancellation `begin` raises.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(cancelled.wait(), wait_s)
