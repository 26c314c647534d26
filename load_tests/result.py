"""The result of a run, with the figures that bounds, reports and plots need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_backend.spec_stats import acceptance_length
from load_tests.hit_rate import IdealHits
from load_tests.observation import Observation
from load_tests.samples import Outcome, Recorder, Sample

DRAFTS = "dflash:spec_decode_num_drafts_total"
ACCEPTED = "dflash:spec_decode_num_accepted_tokens_total"
QUERIES = "dflash:prefix_cache_queries_total"
HITS = "dflash:prefix_cache_hits_total"
GENERATED = "dflash:generation_tokens_total"
PREEMPTIONS = "dflash:num_preemptions_total"
RUNNING = "dflash:num_requests_running"
WAITING = "dflash:num_requests_waiting"
KV_USAGE = "dflash:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """When a phase was, in seconds since the run began."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RunResult:
    """Everything that a run yielded. `ideal` and `ideal_bounded`: the hits of an unbounded prefix cache, and of one
    with the server's number of blocks, None where that is not known. `complete`: the run was not interrupted."""

    recorder: Recorder
    observations: Sequence[Observation]
    phases: Sequence[PhaseSpan]
    duration_s: float
    complete: bool
    settings: dict[str, str] = field(default_factory=dict)
    num_kv_blocks: int | None = None
    ideal: IdealHits | None = None
    ideal_bounded: IdealHits | None = None

    @property
    def samples(self) -> list[Sample]:
        """All requests in the order of sending."""
        return self.recorder.samples

    def measured(self, phase: str | None = None, traffic: str | None = None) -> list[Sample]:
        """The samples that count for times and rates: those sent after the warm-up."""
        return [
            sample
            for sample in self.samples
            if sample.measured and phase in (None, sample.phase) and traffic in (None, sample.traffic)
        ]

    def count(self, outcome: Outcome) -> int:
        """How many requests had this outcome."""
        return sum(sample.outcome == outcome for sample in self.samples)

    def span(self, phase: str) -> PhaseSpan | None:
        """When a phase was; None when the run did not come to it."""
        return next((span for span in self.phases if span.name == phase), None)

    def acceptance_length(self) -> float | None:
        """Mean tokens of a step with drafts, over the right answers."""
        chosen = [sample for sample in self.samples if sample.outcome == "right"]
        return acceptance_length(sum(one.num_drafts for one in chosen), sum(one.num_accepted for one in chosen))

    def hit_rate(self) -> float | None:
        """The share of prompt tokens that came from the prefix cache, from the metrics page, over the whole run."""
        if len(self.observations) < 2:
            return None
        first, last = (observation.metrics for observation in (self.observations[0], self.observations[-1]))
        queries = last.get(QUERIES, 0.0) - first.get(QUERIES, 0.0)
        return (last.get(HITS, 0.0) - first.get(HITS, 0.0)) / queries if queries else None

    def gaps(self, phase: str, traffic: str) -> list[float]:
        """Times between the responses of a traffic's streams in seconds that ended in a phase, also of streams that
        began in the one before: how long a reader waits for the next words. A response holds all tokens of a step, so
        this is the stall that a reader sees, not the time per token."""
        span = self.span(phase)
        if span is None:
            return []
        return [
            gap
            for sample in self.measured(traffic=traffic)
            for at_s, gap in zip(sample.gap_ends(), sample.gaps, strict=True)
            if span.start_s <= at_s < span.end_s
        ]

    def goodput(self, phase: str) -> float | None:
        """Right answers a second that came in a phase; None when the run did not come to it."""
        span = self.span(phase)
        if span is None or span.end_s <= span.start_s:
            return None
        right = sum(s.outcome == "right" and span.start_s <= s.ended_s < span.end_s for s in self.samples)
        return right / (span.end_s - span.start_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the users got, a second, over the whole seconds of the load: what comes once it has ended does
        not count."""
        seconds = int(self.duration_s)
        tokens = sum(count for second, count in self.recorder.tokens_by_second.items() if second < seconds)
        return tokens / seconds if seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """Right answers a second that came before the load ended."""
        right = sum(sample.outcome == "right" and sample.ended_s < self.duration_s for sample in self.samples)
        return right / self.duration_s if self.duration_s else 0.0

    @property
    def own_cores(self) -> float | None:
        """Cores that the load generator used, on average."""
        return self._per_second(lambda observation: observation.own_cpu_s)

    @property
    def others_cores(self) -> float | None:
        """Cores that programs other than the server and the load generator used, on average; None for a server that
        this run did not start."""
        if not self.observations or not (self.observations[-1].cpu_s and self.observations[-1].machine_cpu_s):
            return None
        cores = self._per_second(lambda seen: seen.machine_cpu_s - seen.own_cpu_s - sum(seen.cpu_s.values()))
        return None if cores is None else max(cores, 0.0)

    def lag(self, share: float) -> float | None:
        """A percentile (0 to 1), over the whole seconds of the run, of the most that the load generator was late."""
        lags = self.recorder.lag_by_second.items()
        return percentile((lag for second, lag in lags if second < int(self.duration_s)), share)

    def peak(self, gauge: str) -> float | None:
        """The largest value of a gauge that was seen."""
        return max((o.metrics.get(gauge, 0.0) for o in self.observations), default=None)

    def _per_second(self, counter: Callable[[Observation], float]) -> float | None:
        if len(self.observations) < 2:
            return None
        first, last = self.observations[0], self.observations[-1]
        return (counter(last) - counter(first)) / (last.at_s - first.at_s) if last.at_s > first.at_s else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie; None of nothing."""
    array = np.fromiter(values, dtype=float)
    return float(np.quantile(array, share)) if len(array) else None


def ttfts(samples: Iterable[Sample]) -> list[float]:
    """Times to first token in seconds."""
    return [sample.ttft_s for sample in samples if sample.ttft_s is not None]
