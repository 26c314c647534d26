"""A finished run, and the questions that bounds, reports and plots ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_backend.spec_stats import acceptance_length
from load_tests.ideal import IdealHits
from load_tests.observation import Observation
from load_tests.recording import Recorder, Sample
from load_tests.workload import Options, Scenario

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
    """Everything that a run yielded. `ideal` and `ideal_bounded` are the prefix cache's hits without a bound and with
    as many blocks as the server has; the second is None where that number is not known. `complete` is false when the
    run was interrupted."""

    scenario: Scenario
    options: Options
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

    def count(self, outcome: str) -> int:
        """How many requests ended so."""
        return sum(sample.outcome == outcome for sample in self.samples)

    def span(self, phase: str) -> PhaseSpan | None:
        """When a phase was; None when the run did not come to it."""
        return next((span for span in self.phases if span.name == phase), None)

    def rate(self, counter: str, over: str, start: float = 0.0, end: float = 1.0) -> float | None:
        """The growth of one counter over that of another, between two shares of the run's time."""
        first, last = self._at(start), self._at(end)
        if first is None or last is None:
            return None
        base = last.metrics.get(over, 0.0) - first.metrics.get(over, 0.0)
        return (last.metrics.get(counter, 0.0) - first.metrics.get(counter, 0.0)) / base if base else None

    def acceptance_length(self) -> float | None:
        """Mean tokens of a step with drafts, over the right answers."""
        chosen = [sample for sample in self.samples if sample.outcome == "right"]
        drafts, accepted = (sum(sample.num_drafts for sample in chosen), sum(sample.num_accepted for sample in chosen))
        return acceptance_length(drafts, accepted)

    def hit_rate(self) -> float | None:
        """The share of prompt tokens that came from the prefix cache, from the metrics page, over the whole run."""
        return self.rate(HITS, QUERIES)

    def goodput(self, phase: str) -> float | None:
        """Right answers a second that came in a phase; None when the run did not come to it."""
        span = self.span(phase)
        if span is None or span.end_s <= span.start_s:
            return None
        right = sum(s.outcome == "right" and span.start_s <= s.ended_s < span.end_s for s in self.samples)
        return right / (span.end_s - span.start_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the users got, a second."""
        return sum(self.recorder.tokens_by_second.values()) / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Right answers a second."""
        return self.count("right") / self.duration_s if self.duration_s else 0.0

    @property
    def own_cpu_share(self) -> float | None:
        """Cores that the load generator used, on average."""
        first, last = self._at(0.0), self._at(1.0)
        if first is None or last is None or last.at_s <= first.at_s:
            return None
        return (last.own_cpu_s - first.own_cpu_s) / (last.at_s - first.at_s)

    @property
    def others_cpu_share(self) -> float | None:
        """Cores that programs other than the server and the load generator used, on average; None where the server is
        not ours or the system does not say."""
        first, last = self._at(0.0), self._at(1.0)
        if first is None or last is None or last.at_s <= first.at_s or not (first.cpu_s and last.machine_cpu_s):
            return None
        server = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
        ours = server + last.own_cpu_s - first.own_cpu_s
        return max((last.machine_cpu_s - first.machine_cpu_s - ours) / (last.at_s - first.at_s), 0.0)

    def lag(self, share: float) -> float | None:
        """A percentile (0 to 1), over the seconds of the run, of the most that the load generator was late."""
        return percentile(self.recorder.lag_by_second.values(), share)

    def peak(self, gauge: str) -> float | None:
        """The largest value of a gauge that was seen."""
        return max((o.metrics.get(gauge, 0.0) for o in self.observations), default=None)

    def _at(self, share: float) -> Observation | None:
        if len(self.observations) < 2:
            return None
        return self.observations[round(share * (len(self.observations) - 1))]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie; None of nothing."""
    array = np.fromiter(values, dtype=float)
    return float(np.quantile(array, share)) if len(array) else None


def ttfts(samples: Iterable[Sample], keep: Callable[[Sample], bool] = lambda sample: True) -> list[float]:
    """Times to first token in seconds."""
    return [s.ttft_s for s in samples if s.ttft_s is not None and keep(s)]


def gaps(samples: Iterable[Sample]) -> list[float]:
    """Times between the responses of a stream in seconds: how long a reader waits for the next words. A response holds
    all tokens of a step, so this is the stall that is seen, and not its share for each token."""
    return [gap for sample in samples for gap in sample.gaps]
