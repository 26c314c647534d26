"""A pytest plugin for `make gpu-report`: each test's outcome is appended to the report's records as it comes, so that a
run which is ended counts. The file is that of the environment variable `GPU_REPORT_RECORDS`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.results import CheckRun, Recorder

VARIABLE = "GPU_REPORT_RECORDS"
LONGEST_REASON = 300


def record(test: str, outcome: str, seconds: float, reason: str = "") -> None:
    """Append an outcome. Workers of pytest-xdist leave it to the process that started them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        Recorder(Path(os.environ[VARIABLE])).write(CheckRun(test, outcome, round(seconds, 2), reason[:LONGEST_REASON]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The test's own call; setting up and what comes after only where they fail or skip."""
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
        reason = " ".join(reason.split())
    elif report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    record(report.nodeid, report.outcome, report.duration, reason)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected."""
    if report.failed:
        # What was missing is at the end.
        record(report.nodeid, "failed", 0.0, " ".join(str(report.longrepr).split())[-LONGEST_REASON:])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """How the whole ended."""
    record("all", f"ended with status {int(exitstatus)}", 0.0)
