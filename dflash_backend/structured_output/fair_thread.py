"""A thread that several tenants share: of the jobs that wait, it runs that of the tenant that has had it for the least
time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
# Tenants whose time is kept while jobs wait.
MAX_TENANTS = 1024

Job = tuple[Future[Any], Callable[[], Any]]


class FairThread:
    """Runs jobs one at a time, those of one tenant in order. Any thread may use it. The thread begins with the first
    job and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Job]] = {}
        # Seconds that each tenant has had since there was last nothing to do.
        self._seconds: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def submit(self, tenant: str, call: Callable[[], Result]) -> Future[Result]:
        """Run `call` when it is the tenant's turn. The future can be cancelled until then."""
        future: Future[Result] = Future()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append((future, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            self._run_next()

    def _run_next(self) -> None:
        tenant, (future, call) = self._next()
        if not future.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        else:
            future.set_result(result)
        with self._changed:
            self._seconds[tenant] = self._seconds.get(tenant, 0.0) + time.monotonic() - started

    def _next(self) -> tuple[str, Job]:
        with self._changed:
            while not self._waiting:
                self._seconds.clear()
                self._changed.wait()
            tenant = min(self._waiting, key=lambda name: self._seconds.get(name, 0.0))
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[tenant]
            while len(self._seconds) > MAX_TENANTS:
                del self._seconds[next(iter(self._seconds))]
            return tenant, job
