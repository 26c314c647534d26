"""Jobs of several tenants on one thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from dflash_backend.structured_output.fair_thread import FairThread


class Line:
    """Jobs that write their names, behind one of `tenant` that holds the thread until `go`."""

    def __init__(self, tenant: str) -> None:
        self.ran: list[str] = []
        self._thread = FairThread("test")
        self._held = threading.Event()
        begun = threading.Event()

        def hold() -> None:
            begun.set()
            assert self._held.wait(20)
            time.sleep(0.01)

        self._thread.submit(tenant, hold)
        assert begun.wait(20)

    def add(self, tenant: str, name: str) -> Future[None]:
        return self._thread.submit(tenant, lambda: self.ran.append(name))

    def go(self, *jobs: Future[None]) -> list[str]:
        self._held.set()
        for job in jobs:
            job.result(20)
        return self.ran


def test_a_tenant_that_had_the_thread_lets_another_go_first() -> None:
    line = Line("red")
    jobs = [line.add("red", "red 1"), line.add("red", "red 2"), line.add("blue", "blue 1")]
    assert line.go(*jobs) == ["blue 1", "red 1", "red 2"]


def test_the_jobs_of_a_tenant_keep_their_order() -> None:
    line = Line("red")
    assert line.go(*[line.add("red", str(number)) for number in range(5)]) == ["0", "1", "2", "3", "4"]


def test_a_job_that_is_cancelled_before_its_turn_is_not_run() -> None:
    line = Line("red")
    first, last = line.add("red", "first"), line.add("red", "last")
    assert first.cancel()
    assert line.go(last) == ["last"]


def test_the_error_of_a_job_is_that_of_its_future_and_the_thread_goes_on() -> None:
    thread = FairThread("test")
    wrong = thread.submit("red", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wrong.result(20)
    assert thread.submit("red", lambda: 7).result(20) == 7
