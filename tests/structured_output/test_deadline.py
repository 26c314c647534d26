"""Jobs that take too long are given up, and no other job waits for them."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_backend.structured_output.deadline import DeadlineThread


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_job_that_takes_too_long_is_given_up_and_the_others_are_done() -> None:
    done: list[str] = []
    end = threading.Event()

    def endless() -> None:
        while not end.is_set():
            pass
        done.append("late")

    thread = DeadlineThread("test", limit_s=0.05, total_limit_s=30)
    late, left = thread.run([lambda: done.append("a"), endless, lambda: done.append("b"), lambda: done.append("c")])
    assert (late, left) == ([1], [])
    assert done == ["a", "b", "c"]
    # The thread that was given up takes no job any more.
    end.set()
    assert thread.run([lambda: done.append("d")]) == ([], [])
    assert "d" in done


def test_no_job_begins_after_the_time_of_all() -> None:
    done: list[int] = []
    thread = DeadlineThread("test", limit_s=30, total_limit_s=0.05)
    late, left = thread.run([lambda: busy(0.1), lambda: done.append(1), lambda: done.append(2)])
    assert (late, left) == ([], [1, 2])
    assert done == []
    assert thread.run([lambda: done.append(3)]) == ([], [])
    assert done == [3]


def test_a_job_that_waits_for_the_processor_is_not_late() -> None:
    thread = DeadlineThread("test", limit_s=0.02, total_limit_s=30)
    assert thread.run([lambda: time.sleep(0.1), lambda: None]) == ([], [])


@pytest.mark.parametrize("count", [0, 1, 100])
def test_all_jobs_are_done_in_order(count: int) -> None:
    done: list[int] = []
    thread = DeadlineThread("test", limit_s=1, total_limit_s=30)
    assert thread.run([lambda i=i: done.append(i) for i in range(count)]) == ([], [])  # type: ignore[misc]
    assert done == list(range(count))


def test_what_a_job_raises_reaches_who_waits_for_it() -> None:
    done: list[str] = []
    thread = DeadlineThread("test", limit_s=30, total_limit_s=30)
    with pytest.raises(ZeroDivisionError):
        thread.run([lambda: done.append("a"), lambda: 1 // 0, lambda: done.append("b")])
    assert thread.run([lambda: done.append("c")]) == ([], [])
    assert done == ["a", "c"]
