"""The bounds that scenarios share. Each takes a finished run and says what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import mean

import numpy as np

from dflash_backend.spec_stats import acceptance_length
from load_tests.result import KV_USAGE, RUNNING, WAITING, RunResult, percentile, ttfts
from load_tests.samples import Sample
from load_tests.verdict import Bound

# Loss of hit rate in points up to which the pool counts as large enough for the workload.
POOL_LOSS_POINTS = 0.1
# The same questions are compared, and what they accept does not depend on other requests, so a few answers tell.
MIN_DRIFT_ANSWERS = 50
# A median of fewer says little.
MIN_TTFT_ANSWERS = 10
CACHING_OFF = "prefix caching is off"


def answers(result: RunResult, refusals_allowed: bool = False) -> list[Bound]:
    """What every scenario asks for: right answers, no errors, and nothing left behind in the engine."""
    bounds = [
        Bound("wrong answers", result.recorder.num_wrong, "at most", 0),
        Bound("errors", result.count("error"), "at most", 0, note=_errors(result)),
        Bound("right answers", result.count("right"), "at least", 1),
    ]
    if not refusals_allowed:
        bounds.append(Bound("refused requests", result.count("refused"), "at most", 0))
    last = result.observations[-1].metrics if result.observations else None
    for name, metric in (("running", RUNNING), ("waiting", WAITING)):
        value = None if last is None else last.get(metric)
        bounds.append(Bound(f"requests still {name} after the end", value, "at most", 0))
    usage = None if last is None else last.get(KV_USAGE)
    bounds.append(Bound("KV blocks still in use after the end", usage, "at most", 0, note="share of the pool"))
    return bounds


def acceptance_drift(result: RunResult) -> Bound:
    """Acceptance length in the last quarter of the run against the first, over the questions that both have."""
    quarters = [_by_question(result, start, start + 0.25) for start in (0.0, 0.75)]
    # Some questions accept more than others, so each counts alike on both sides.
    weights = {
        name: min(len(quarter[name]) for quarter in quarters) for name in quarters[0].keys() & quarters[1].keys()
    }
    first, last = (_acceptance_length(quarter, weights) for quarter in quarters)
    drift = None if first is None or last is None else abs(last / first - 1) * 100
    compared = sum(weights.values())
    enough = compared >= MIN_DRIFT_ANSWERS
    found = [] if drift is None else [f"{first:.3f} in the first, {last:.3f} in the last"]
    if not enough:
        found.append(
            f"the quarters have {compared} answers to the same questions, at least {MIN_DRIFT_ANSWERS} are needed"
        )
    note = "; ".join(found)
    return Bound(
        "acceptance length of the last quarter, off the first's", drift, "at most", 1.0, "%", required=enough, note=note
    )


def hit_rate(result: RunResult) -> Bound:
    """Distance of the prefix cache's hit rate from that of an unbounded cache."""
    bound = partial(Bound, "prefix cache hit rate below the ideal", kind="at most", limit=2.0, unit="points")
    measured, ideal, bounded = result.hit_rate(), result.ideal, result.ideal_bounded
    if not _caching(result):
        return bound(None, applies=False, note=CACHING_OFF)
    if measured is None or ideal is None:
        return bound(None)
    note = f"measured {measured * 100:.2f} %, unbounded cache {ideal.rate * 100:.2f} %"
    loss = 0.0 if bounded is None else (ideal.rate - bounded.rate) * 100
    if bounded is not None:
        note += f", cache of the server's {result.num_kv_blocks} blocks {bounded.rate * 100:.2f} %"
    large_enough = loss <= POOL_LOSS_POINTS
    if not large_enough:
        note += "; the pool is too small for this workload"
    return bound(max((ideal.rate - measured) * 100, 0.0), required=large_enough, note=note)


def hit_ttft(result: RunResult, limit: float = 0.25) -> Bound:
    """Median time to first token of requests that hit the cache, over that of those that missed it, in the last phase:
    both under the same load."""
    bound = partial(Bound, "time to first token, hits over misses (medians)", kind="at most", limit=limit)
    if not _caching(result):
        return bound(None, applies=False, note=CACHING_OFF)
    last_phase = result.phases[-1].name if result.phases else ""
    samples = [sample for sample in result.measured(last_phase) if sample.outcome == "right"]
    hits, misses = (ttfts(sample for sample in samples if sample.is_hit is hit) for hit in (True, False))
    hit, miss = percentile(hits, 0.5), percentile(misses, 0.5)
    if hit is None or miss is None:
        return bound(None, note=f"{len(hits)} hits, {len(misses)} misses")
    note = f"{hit * 1e3:.1f} ms over {len(hits)} hits, {miss * 1e3:.1f} ms over {len(misses)} misses"
    enough = min(len(hits), len(misses)) >= MIN_TTFT_ANSWERS
    if not enough:
        note += f"; at least {MIN_TTFT_ANSWERS} of each are needed"
    return bound(hit / miss, required=enough, note=note)


def gap_p99(result: RunResult, traffic: str, before: str, after: str, limit: float) -> Bound:
    """The 99th percentile of the time between the responses of a traffic's streams, in one phase over another: by when
    the responses came, since a stream goes on where its phase has ended."""
    p99 = {phase: percentile(result.gaps(phase, traffic), 0.99) for phase in (before, after)}
    first, second = p99[before], p99[after]
    name = f"inter-token p99 in '{after}' over '{before}'"
    if not first or second is None:
        return Bound(name, None, "at most", limit)
    note = f"{first * 1e3:.1f} ms and {second * 1e3:.1f} ms"
    return Bound(name, second / first, "at most", limit, note=note)


def flat_memory(result: RunResult, role: str, limit_percent: float = 2.0) -> Bound:
    """How far a process's resident memory moves in the last third of the run."""
    name = f"memory of the {role} in the last third, largest over smallest"
    bound = partial(Bound, name, kind="at most", limit=limit_percent, unit="%")
    seen = result.observations[2 * len(result.observations) // 3 :]
    sizes = [observation.rss_bytes[role] for observation in seen if observation.rss_bytes.get(role)]
    if result.observations and not result.observations[0].rss_bytes:
        return bound(None, required=False, note="not our server: its memory is unseen")
    if len(sizes) < 3:
        return bound(None)
    smooth = np.convolve(sizes, np.ones(3) / 3, mode="valid")
    note = f"{smooth.min() / 2**20:.1f} to {smooth.max() / 2**20:.1f} MiB"
    return bound(float((smooth.max() / smooth.min() - 1) * 100), note=note)


def _caching(result: RunResult) -> bool:
    return result.settings.get("enable_prefix_caching", "true").lower() not in ("false", "0")


def _by_question(result: RunResult, start: float, end: float) -> dict[str, list[Sample]]:
    """The right answers with drafts that were asked for between two shares of the run's time, by question."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in result.samples:
        if sample.outcome == "right" and sample.num_drafts and start <= sample.sent_s / result.duration_s < end:
            found[sample.question].append(sample)
    return dict(found)


def _acceptance_length(answers: dict[str, list[Sample]], weights: dict[str, int]) -> float | None:
    """Mean tokens of a step with drafts, when each question was asked as often as its weight says."""

    def total(count: Callable[[Sample], int]) -> float:
        return sum(weight * mean(map(count, answers[name])) for name, weight in weights.items())

    return acceptance_length(total(lambda sample: sample.num_drafts), total(lambda sample: sample.num_accepted))


def _errors(result: RunResult) -> str:
    """The first error, in its own words."""
    return next((sample.status or "given up" for sample in result.samples if sample.outcome == "error"), "")
