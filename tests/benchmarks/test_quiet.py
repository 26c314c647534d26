"""Slices that other processes disturb run again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import quiet
from benchmarks.adaptive import cells
from benchmarks.adaptive.__main__ import report


@contextmanager
def busy_process() -> Iterator[None]:
    code = "import time; end = time.monotonic() + 20; print(flush=True)\nwhile time.monotonic() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_another_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with busy_process():
        watch = quiet.OthersWatch()
        time.sleep(0.5)
        assert watch.share() > quiet.MOST_OTHERS


def test_own_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0])  # all that the machine did in between was this process's second
    monkeypatch.setattr("psutil.cpu_times", lambda: SimpleNamespace(user=next(times), system=0.0))
    own = iter([3.0, 4.0])
    monkeypatch.setattr("time.process_time", lambda: next(own))
    assert quiet.OthersWatch().share() == 0.0


class Loop:
    def __init__(self) -> None:
        self.rates = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def slice(self, seconds: float, clock: object) -> float:
        return next(self.rates)


@pytest.mark.parametrize(
    ("shares", "rate", "num_repeated", "num_disturbed"),
    [([0.02], 1.0, 0, 0), ([0.5, 0.02], 2.0, 1, 0), ([0.5, 0.5, 0.5], 4.0, 3, 1)],
)
def test_a_disturbed_slice_runs_again(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], rate: float, num_repeated: int, num_disturbed: int
) -> None:
    left = iter(shares)
    monkeypatch.setattr(cells, "OthersWatch", lambda: SimpleNamespace(share=lambda: next(left)))
    rates = cells.Rates()
    assert cells.quiet_slice(Loop(), 1.0, time.perf_counter, rates) == rate  # type: ignore[arg-type]
    assert (rates.num_repeated, rates.num_disturbed) == (num_repeated, num_disturbed)
    told = report("table", [rates, cells.Rates(num_repeated=1)], 7, 1.0, 60.0)
    assert f"{num_repeated + 1} slices ran again" in told
    assert f"{num_disturbed} count although" in told


def test_processor_time_needs_no_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "OthersWatch", lambda: SimpleNamespace(share=lambda: 0.9))
    rates = cells.Rates()
    assert cells.quiet_slice(Loop(), 1.0, time.process_time, rates) == 1.0  # type: ignore[arg-type]
    assert rates.num_repeated == 0
