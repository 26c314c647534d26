"""A pytest plugin: the processor and wall seconds that each test file takes, over all workers, held to its budget.

Processor time is that of the process that runs the tests and of all that it started, so it depends little on what else
the machine does. What a fixture of the whole session takes, such as starting the shared server, and what collecting
takes belong to no file: which one would pay differs from run to run.
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiers import TOGETHER, Tier, is_far_above, read_table, slower_than_table

OUTSIDE = "(outside files)"


def processor_seconds() -> float:
    """Processor seconds so far of this process and its descendants, those that have ended included."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
        except psutil.NoSuchProcess:
            continue
    return total


class FileTimes:
    """Sums over the tests that this process runs. The process that hands out tests has those of its workers."""

    def __init__(self, config: pytest.Config, tier: Tier) -> None:
        self.config, self.tier = config, tier
        self.seconds: dict[str, tuple[float, float]] = {}
        """Processor and wall seconds, by file."""
        self.skipped: Counter[str] = Counter()
        """How many tests were skipped, by file; all of a module that is skipped count as one."""
        self._file = OUTSIDE
        self._counted = processor_seconds()

    def add(self, file: str, processor: float = 0.0, wall: float = 0.0) -> None:
        before = self.seconds.get(file, (0.0, 0.0))
        self.seconds[file] = (before[0] + processor, before[1] + wall)

    def enter(self, file: str) -> None:
        """What is used from here on is `file`'s."""
        if file != self._file:
            now = processor_seconds()
            # Less than before where a process ended for which nobody waited.
            self.add(self._file, processor=max(now - self._counted, 0.0))
            self._file, self._counted = file, now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        file = item.path.relative_to(self.config.rootpath).as_posix()
        self.enter(file)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.add(file, wall=time.monotonic() - start)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope != "session":
            return (yield)
        file = self._file
        self.enter(OUTSIDE)
        try:
            return (yield)
        finally:
            self.enter(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.count_skip(report)

    def count_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """The process that hands out tests has the reports of its workers too."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid.partition("::")[0]] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, (processor, wall) in getattr(node, "workeroutput", {}).get("file_times", {}).items():
            self.add(file, processor, wall)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.enter("")
            self.config.workeroutput["file_times"] = self.seconds
            return
        if not self.config.getoption("numprocesses", None):
            self.enter("")  # workers count for themselves
        self.seconds.pop("", None)
        if path := self.config.getoption("--file-times"):
            write_times(Path(path), self.seconds, self.skipped)
        if self.config.getoption("--strict-times") and self.above() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def above(self) -> list[str]:
        """A line for each file that took far more than its row of the table says."""
        return files_above(self.seconds, self.tier)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.config.getoption("--strict-times") and (lines := self.above()):
            terminalreporter.section("files far above their processor seconds in tests/tiers.csv")
            for line in lines:
                terminalreporter.write_line(line)
            terminalreporter.write_line(
                "Make them cheaper, or where they are worth it measure them: python -m tests.tiers FILE..."
            )


def files_above(seconds: Mapping[str, tuple[float, float]], tier: Tier) -> list[str]:
    """What to say of each file of `seconds` that took far more than the table says of it in this tier. Files that share
    a process, such as a browser, are measured together: whose its processor time is depends on when it is read."""
    table = read_table()
    slower = slower_than_table({file: processor for file, (processor, _) in seconds.items()}, tier)
    lines = []
    groups = {group[0]: group for group in TOGETHER if group[0] in seconds}
    alone = set(seconds) - {file for group in groups.values() for file in group} - {OUTSIDE}
    for files in sorted([*((file,) for file in alone), *groups.values()]):
        ran = [file for file in files if file in seconds]
        processor = sum(seconds[file][0] for file in ran)
        rows = [row for file in ran if file in table and (row := table[file].of(tier)) is not None]
        recorded = sum(rows) if rows else None
        if is_far_above(processor, recorded, slower):
            lines.append(f"{', '.join(ran)}: {processor:.1f} s, recorded {'nothing' if recorded is None else recorded}")
    return lines


def write_times(path: Path, seconds: Mapping[str, tuple[float, float]], skipped: Mapping[str, int]) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(("file", "seconds", "wall", "skipped"))
        for file, (processor, wall) in sorted(seconds.items(), key=lambda entry: -entry[1][0]):
            rows.writerow((file, f"{processor:.2f}", f"{wall:.2f}", skipped.get(file, 0)))
