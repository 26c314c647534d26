"""A run second by second, from the server's metrics page and from the users. Written as CSV and drawn by `plots`."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np

from dflash_backend.spec_stats import acceptance_length
from load_tests.observation import Observation
from load_tests.recording import Sample
from load_tests.result import (
    ACCEPTED,
    DRAFTS,
    GENERATED,
    HITS,
    KV_USAGE,
    PREEMPTIONS,
    QUERIES,
    RUNNING,
    WAITING,
    RunResult,
)

# Percentiles need a few requests each; a run has about this many windows, and none is shorter than a second.
WINDOWS = 120


@dataclass(frozen=True, slots=True)
class ServerSecond:
    """What the server's metrics page said of the time since the look before; rates are a second, None: nothing to
    divide by."""

    at_s: float
    running: float
    waiting: float
    kv_usage: float
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float | None
    acceptance_length: float | None
    preemptions: float
    stub_rss_mib: float | None
    engine_rss_mib: float | None
    server_rss_mib: float | None
    server_cores: float | None
    load_generator_cores: float


@dataclass(frozen=True, slots=True)
class UserWindow:
    """What users saw in a window that begins at `at_s`: requests by when they ended, times by when they were."""

    at_s: float
    seconds: float
    finished_per_s: float
    wrong: int
    errors: int
    refused: int
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    load_generator_lag_s: float


def server_seconds(observations: Sequence[Observation]) -> list[ServerSecond]:
    """A row for each look at the server but the first."""
    return [_server_second(before, now) for before, now in pairwise(observations)]


def server_windows(observations: Sequence[Observation]) -> list[ServerSecond]:
    """The same over longer times: a second of few requests says little about a share."""
    return server_seconds(observations[:: max(1, round(len(observations) / WINDOWS))])


def user_windows(result: RunResult) -> list[UserWindow]:
    """The run cut into windows of equal length, whole seconds each."""
    seconds = max(1, round(result.duration_s / WINDOWS))
    ended: defaultdict[int, list[Sample]] = defaultdict(list)
    first: defaultdict[int, list[float]] = defaultdict(list)
    gaps: defaultdict[int, list[float]] = defaultdict(list)
    for sample in result.samples:
        ended[int(sample.ended_s) // seconds].append(sample)
        if sample.first_s is not None and sample.ttft_s is not None:
            first[int(sample.first_s) // seconds].append(sample.ttft_s)
            at = sample.first_s
            for gap in sample.gaps:
                at += gap
                gaps[int(at) // seconds].append(gap)
    return [
        _user_window(result, number * seconds, seconds, ended[number], first[number], gaps[number])
        for number in range(int(result.duration_s) // seconds)
    ]


def write_csv(rows: Sequence[ServerSecond] | Sequence[UserWindow], path: Path) -> None:
    """A line for each row, with the names of the fields above."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def _server_second(before: Observation, now: Observation) -> ServerSecond:
    seconds = now.at_s - before.at_s

    def grown(name: str) -> float:
        return now.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    def share(name: str, over: str) -> float | None:
        return grown(name) / grown(over) if grown(over) > 0 else None

    cores = sum(now.cpu_s.values()) - sum(before.cpu_s.values())
    return ServerSecond(
        at_s=now.at_s,
        running=now.metrics.get(RUNNING, 0.0),
        waiting=now.metrics.get(WAITING, 0.0),
        kv_usage=now.metrics.get(KV_USAGE, 0.0),
        generated_tokens_per_s=grown(GENERATED) / seconds,
        prompt_tokens_per_s=grown(QUERIES) / seconds,
        hit_rate=share(HITS, QUERIES),
        acceptance_length=acceptance_length(grown(DRAFTS), grown(ACCEPTED)),
        preemptions=grown(PREEMPTIONS),
        stub_rss_mib=_mib(now, "stub"),
        engine_rss_mib=_mib(now, "engine"),
        server_rss_mib=_mib(now, "server"),
        server_cores=cores / seconds if now.cpu_s else None,
        load_generator_cores=(now.own_cpu_s - before.own_cpu_s) / seconds,
    )


def _mib(observation: Observation, role: str) -> float | None:
    size = observation.rss_bytes.get(role)
    return None if not size else size / 2**20


def _user_window(
    result: RunResult, start: int, seconds: int, ended: list[Sample], ttfts: list[float], gaps: list[float]
) -> UserWindow:
    recorder = result.recorder
    ttft_p50, ttft_p99 = _median_and_p99(ttfts)
    gap_p50, gap_p99 = _median_and_p99(gaps)
    return UserWindow(
        at_s=start,
        seconds=seconds,
        finished_per_s=sum(sample.outcome == "right" for sample in ended) / seconds,
        wrong=sum(sample.outcome == "wrong" for sample in ended),
        errors=sum(sample.outcome == "error" for sample in ended),
        refused=sum(sample.outcome == "refused" for sample in ended),
        tokens_per_s=sum(recorder.tokens_by_second[start + offset] for offset in range(seconds)) / seconds,
        ttft_p50_s=ttft_p50,
        ttft_p99_s=ttft_p99,
        gap_p50_s=gap_p50,
        gap_p99_s=gap_p99,
        load_generator_lag_s=max(recorder.lag_by_second.get(start + offset, 0.0) for offset in range(seconds)),
    )


def _median_and_p99(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    median, p99 = np.quantile(values, [0.5, 0.99])
    return float(median), float(p99)
