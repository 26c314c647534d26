"""A run second by second, from the server's metrics page and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_backend.spec_stats import acceptance_length
from load_tests.observation import Observation
from load_tests.result import ACCEPTED, DRAFTS, GENERATED, HITS, KV_USAGE, PREEMPTIONS, QUERIES, RUNNING, WAITING

# Shares and percentiles need some requests each: a run is shown in about this many windows of at least a second.
WINDOWS = 120


@dataclass(frozen=True, slots=True)
class ServerSecond:
    """The server between two observations. Rates are per second; None: nothing to divide by, or not observed."""

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


def server_seconds(observations: Sequence[Observation]) -> list[ServerSecond]:
    """A row for each observation but the first."""
    return [_server_second(before, now) for before, now in pairwise(observations)]


def server_windows(observations: Sequence[Observation]) -> list[ServerSecond]:
    """The same over longer times: a second with few requests says little about a share."""
    return server_seconds(observations[:: max(1, round(len(observations) / WINDOWS))])


def in_windows(points: Sequence[tuple[float, float]], duration_s: float) -> tuple[list[int], list[list[float]]]:
    """Group (time, value) points into windows of whole seconds; returns where the windows begin, and their values."""
    seconds = max(1, round(duration_s / WINDOWS))
    values: list[list[float]] = [[] for _ in range(int(duration_s) // seconds)]
    for at_s, value in points:
        if int(at_s) // seconds < len(values):
            values[int(at_s) // seconds].append(value)
    return [number * seconds for number in range(len(values))], values


def percentiles(values: Sequence[Sequence[float]], share: float) -> list[float]:
    """A percentile (0 to 1) of each window; NaN where it is empty."""
    return [float(np.quantile(window, share)) if len(window) else float("nan") for window in values]


def _server_second(before: Observation, now: Observation) -> ServerSecond:
    seconds = now.at_s - before.at_s

    def grown(name: str) -> float:
        return now.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    def share(name: str, over: str) -> float | None:
        return grown(name) / grown(over) if grown(over) > 0 else None

    def mib(role: str) -> float | None:
        return now.rss_bytes[role] / 2**20 if now.rss_bytes.get(role) else None

    cpu_s = sum(now.cpu_s.values()) - sum(before.cpu_s.values())
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
        stub_rss_mib=mib("stub"),
        engine_rss_mib=mib("engine"),
        server_rss_mib=mib("server"),
        server_cores=cpu_s / seconds if now.cpu_s else None,
        load_generator_cores=(now.own_cpu_s - before.own_cpu_s) / seconds,
    )
