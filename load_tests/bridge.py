"""Lets locust's users, which are greenlets, wait for coroutines, which run in one event loop in a thread of its own.

locust is told not to patch the standard library (see `load_tests.locust_setup`), so sockets, threads and gRPC are what
they are in any program, and `AsyncDFlashClient` is the client that users of this project have. A greenlet crosses over
once a request, not once a response, which keeps the load generator cheap.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0


class Bridge:
    """An event loop in a thread. A context manager; made and used in the thread of gevent's hub."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load-test-clients", daemon=True)
        self._done: deque[AsyncResult] = deque()
        # What may be sent from another thread to wake the hub.
        self._wake = gevent.get_hub().loop.async_()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop; the calling greenlet waits, others go on. Raises what it raises."""
        waiter = AsyncResult()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(lambda done: self._finished(waiter))
        try:
            waiter.get()
        finally:
            future.cancel()  # when the greenlet is killed; does nothing afterwards
        return future.result()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the loop and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __enter__(self) -> Bridge:
        self._wake.start(self._deliver)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_everything(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()
        self._wake.stop()
        self._wake.close()

    def _finished(self, waiter: AsyncResult) -> None:
        """In the loop's thread: wake the hub."""
        self._done.append(waiter)
        self._wake.send()

    def _deliver(self) -> None:
        """In the hub: several results may have come for one wake."""
        while self._done:
            self._done.popleft().set()


async def _cancel_everything() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
