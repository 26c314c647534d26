"""A run of the tests that would wait forever ends, and says for what it waited."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.stalled_run import StalledRun, stacks_of


class Ended:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def wait(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while not self.texts and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.texts[0] if self.texts else None


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def run(ended: Ended) -> Iterator[StalledRun]:
    run = StalledRun(0.5, ended.texts.append)
    yield run
    run.pytest_unconfigure()


def test_a_silent_run_ends_with_the_tests_that_had_begun(run: StalledRun, ended: Ended) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run.pytest_runtest_logstart("tests/test_a.py::test_ended")
        run.pytest_runtest_logfinish("tests/test_a.py::test_ended")
        run.pytest_runtest_logstart("tests/test_a.py::test_blocked")
        run.pytest_sessionstart()
        text = ended.wait(30.0)
    finally:
        child.kill()
        child.wait()
    assert text is not None
    assert text.startswith("\nNo test has reported anything for ")
    assert "test_blocked" in text
    assert "test_ended" not in text
    assert f"\n  {child.pid} of " in text


@pytest.mark.parametrize(("code", "cause"), [("import os; os.abort()", "signal 6"), ("exit(3)", "exit status 3")])
def test_a_worker_that_died_ends_the_run_although_others_report(
    run: StalledRun, ended: Ended, code: str, cause: str
) -> None:
    """As when a process that it had forked keeps its connection open: pytest-xdist goes on waiting for it."""
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        run.pytest_sessionstart()
        deadline = time.monotonic() + 30.0
        while not ended.texts and time.monotonic() < deadline:
            run.pytest_runtest_logstart("tests/test_a.py::test_other")
            time.sleep(0.01)
    assert ended.texts[0].startswith(f"\nWorker process {child.pid} died of {cause}. Begun")


def test_a_run_goes_on_where_tests_report_and_workers_end_well(run: StalledRun, ended: Ended) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]):
        run.pytest_sessionstart()
        for _ in range(100):
            run.pytest_runtest_logstart("tests/test_a.py::test_other")
            run.pytest_runtest_logfinish("tests/test_a.py::test_other")
            time.sleep(0.01)
    assert ended.texts == []


def test_a_process_that_is_gone_has_no_stacks_and_the_text_is_still_written() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert stacks_of(child.pid)
