"""A thread whose jobs have a deadline: one that passes it is given up, and the jobs after it go to a new thread.

A job in llguidance cannot be stopped. What a thread that was given up still does is bounded by llguidance's own limits
(`bounds`), and changes nothing that others see.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from dflash_backend.structured_output.trial import processor_seconds

# How often a job that takes long is looked at, in seconds.
POLL_S = 0.02


class _Batch:
    """Jobs in order, of which `num_done` are done. With `stopped` no other one begins; with `given_up` the one that is
    under way counts no more."""

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self.calls = calls
        self.num_done = 0
        self.stopped = self.given_up = False
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - who waits for the batch raises it
            self.error = error
        self.ended.set()

    def _run(self) -> None:
        for call in self.calls:
            if self.stopped:
                break
            call()
            with self._lock:
                if self.given_up:
                    return
                self.num_done += 1

    def give_up(self, num_done: int) -> bool:
        """Give the job up that is under way after `num_done`; False if it has ended meanwhile."""
        with self._lock:
            self.given_up = self.num_done == num_done
            return self.given_up


class DeadlineThread:
    """Runs jobs one after the other. One thread at a time may use it."""

    def __init__(self, name: str, limit_s: float, total_limit_s: float) -> None:
        """limit_s: processor time of one job, so that none is late because the machine is busy. total_limit_s: after
        this time of one call of `run` no other job begins."""
        self._name = name
        self._limit_s = limit_s
        self._total_limit_s = total_limit_s
        self._batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, calls: Sequence[Callable[[], None]]) -> tuple[list[int], list[int]]:
        """Run each of `calls`. Returns the numbers of those that passed their deadline, and of those whose turn did not
        come. Raises what one of them raises, unless it was given up."""
        late: list[int] = []
        began, first = time.monotonic(), 0
        while first < len(calls) and time.monotonic() - began < self._total_limit_s:
            batch = _Batch(calls[first:])
            self._give(batch)
            is_late = self._wait(batch, began)
            if batch.error is not None and not is_late:
                raise batch.error
            first += batch.num_done
            if is_late:
                late.append(first)
                first += 1
        return late, list(range(first, len(calls)))

    def _wait(self, batch: _Batch, began: float) -> bool:
        """Wait for a batch, and give its thread up if one of its jobs is late: then this is true."""
        num_done, used = -1, 0.0
        while not batch.ended.wait(POLL_S):
            assert self._thread is not None
            seconds = processor_seconds(f"self/task/{self._thread.native_id}")
            if batch.num_done > num_done:
                num_done, used = batch.num_done, seconds
            elif seconds - used > self._limit_s and batch.give_up(num_done):
                self._thread = None
                return True
            batch.stopped = batch.stopped or time.monotonic() - began > self._total_limit_s
        return False

    def _give(self, batch: _Batch) -> None:
        if self._thread is None:
            self._batches = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._batches,), name=self._name, daemon=True)
            self._thread.start()
        self._batches.put(batch)


def _serve(batches: queue.SimpleQueue[_Batch]) -> None:
    while True:
        batch = batches.get()
        batch.run()
        if batch.given_up:
            return
