"""A scenario, and a run of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from load_tests.result import RunResult
from load_tests.verdict import Bound, Verdict, verdict
from load_tests.workload import Options, Phase, Question


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another run of the same workload. `settings`: what is changed of the first run's; `compare`: compares the first
    result beside this one."""

    name: str
    settings: Callable[[Mapping[str, str]], Mapping[str, str]]
    compare: Callable[[RunResult, RunResult], Bound]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load test. `summary` says what it does in a line, `shows` what its verdict means. `defaults` are the options
    where the user chose none, `settings` the server's. `compare_at_least`: the least ratio of throughputs with
    `--compare`, by the setting that is changed, as `name=value`. `against`: runs that it is always compared with."""

    name: str
    summary: str
    shows: str
    defaults: Options
    settings: Mapping[str, str]
    questions: Callable[[Options], Sequence[Question]]
    phases: Callable[[Options, Sequence[Question]], Sequence[Phase]]
    bounds: Callable[[RunResult], Sequence[Bound]]
    compare_at_least: Mapping[str, float] = field(default_factory=dict)
    against: Sequence[Comparison] = ()

    def compare(self, first: RunResult, second: RunResult, changed: str) -> Bound:
        """The throughput of a run over that of the same workload with the setting `changed`."""
        limit, base = self.compare_at_least.get(changed), second.requests_per_s
        return Bound(
            f"throughput over that with {changed}",
            first.requests_per_s / base if base else None,
            "at least",
            limit or 0.0,
            applies=limit is not None,
            note=f"{first.requests_per_s:.1f} and {base:.1f} right answers/s",
        )


@dataclass(frozen=True)
class Run:
    """A finished run of a scenario. Its reports are in `directory`."""

    scenario: Scenario
    options: Options
    result: RunResult
    directory: Path

    @cached_property
    def bounds(self) -> list[Bound]:
        """What the scenario asks of the result."""
        return list(self.scenario.bounds(self.result))

    @property
    def verdict(self) -> Verdict:
        """The verdict over all bounds."""
        return verdict(self.result.complete, self.bounds)
