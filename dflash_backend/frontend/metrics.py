"""The metrics of the serving contract, on Triton's metrics port. Fed and flushed by `frontend.service`.

Reaching Triton costs a round trip between processes for every value, so values are gathered here and handed over once
in a while. A new metric is one entry in `METRICS` and a call that feeds it.

A model with several instances has several stub processes, and Triton gives those that declare the same name and labels
one value between them. Counters and histograms are added to, so they are the model's sums. A gauge is set, so each
engine has its own, told apart by the label `engine`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from dflash_backend.messages import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `label` names its label besides `model`; `buckets` are a histogram's upper bounds in seconds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("dflash:spec_decode_num_drafts_total", "counter", "Draft blocks that were verified"),
    MetricSpec("dflash:spec_decode_num_draft_tokens_total", "counter", "Draft tokens that were verified"),
    MetricSpec("dflash:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were accepted"),
    MetricSpec(
        "dflash:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft blocks whose token at this position (0-based) was accepted",
        label="position",
    ),
    MetricSpec("dflash:prompt_tokens_total", "counter", "Tokens of prompts whose answers have begun"),
    MetricSpec("dflash:generation_tokens_total", "counter", "Tokens that were sent to clients"),
    MetricSpec("dflash:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache"),
    MetricSpec("dflash:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache"),
    MetricSpec("dflash:num_preemptions_total", "counter", "Requests that gave up their blocks for others"),
    MetricSpec(
        "dflash:request_success_total", "counter", "Finished requests by finish reason", label="finished_reason"
    ),
    MetricSpec("dflash:request_errors_total", "counter", "Requests that ended in an error by status", label="status"),
    MetricSpec("dflash:engine_restarts_total", "counter", "Engine processes that were started after one had died"),
    MetricSpec("dflash:engine_ready", "gauge", "1 while the engine takes requests, else 0", label="engine"),
    MetricSpec("dflash:num_requests_running", "gauge", "Requests that run", label="engine"),
    MetricSpec("dflash:num_requests_waiting", "gauge", "Requests that wait", label="engine"),
    MetricSpec("dflash:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1", label="engine"),
    MetricSpec(
        "dflash:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token", "", _SECONDS
    ),
    MetricSpec(
        "dflash:inter_token_latency_seconds",
        "histogram",
        "Mean time between the tokens of a request, observed once a request",
        "",
        _TOKEN_SECONDS,
    ),
    MetricSpec(
        "dflash:e2e_request_latency_seconds", "histogram", "From a request's arrival to its last token", "", _SECONDS
    ),
    MetricSpec(
        "dflash:request_queue_time_seconds", "histogram", "From a request's arrival to its first step", "", _SECONDS
    ),
    MetricSpec(
        "dflash:step_seconds", "histogram", "Time of an engine step's phases", label="phase", buckets=_STEP_SECONDS
    ),
)

# Counters of the engine, by the field of `EngineStats` that they follow. Tokens of prompts and answers are counted by
# the frontend instead: a prompt once however many completions it has, and of an answer what belongs to it, so without
# what was generated past a stop string.
_ENGINE_COUNTERS = {
    "num_drafts": "dflash:spec_decode_num_drafts_total",
    "num_draft_tokens": "dflash:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "dflash:spec_decode_num_accepted_tokens_total",
    "prefix_cache_queries": "dflash:prefix_cache_queries_total",
    "prefix_cache_hits": "dflash:prefix_cache_hits_total",
    "num_preemptions": "dflash:num_preemptions_total",
}
_ENGINE_GAUGES = {
    "num_requests_running": "dflash:num_requests_running",
    "num_requests_waiting": "dflash:num_requests_waiting",
    "kv_cache_usage": "dflash:kv_cache_usage_perc",
}


class Metrics:
    """Gathers values; `flush` hands them to Triton. Any thread may `count`; the rest belongs to one."""

    def __init__(self, pb_utils: ModuleType, model_name: str, engine: str, log: Callable[[str], None]) -> None:
        """`engine` names this instance of the model. `log` gets a line when this Triton has no histograms: `_sum` and
        `_count` counters stand in then."""
        self._pb = pb_utils
        self._model = model_name
        self._engine = engine
        self._log = log
        self._has_failed = False
        self._has_histograms = hasattr(pb_utils.MetricFamily, "HISTOGRAM")
        if not self._has_histograms:
            log("this Triton has no histogram metrics; counters that end in _sum and _count stand in for them")
        self._specs = {spec.name: spec for spec in METRICS}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._counts_lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._observations: list[tuple[str, str, float]] = []
        self._last = EngineStats()
        for spec in METRICS:
            self._declare(spec)

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        with self._counts_lock:
            self._counts[name, label] += amount

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        """Add an observation to a histogram."""
        if self._has_histograms:
            self._observations.append((name, label, seconds))
        else:
            self.count(name + "_sum", seconds, label)
            self.count(name + "_count", 1, label)

    def observe_step(self, phase_seconds: Mapping[str, float]) -> None:
        """Add the times of an engine step's phases."""
        for phase, seconds in phase_seconds.items():
            self.observe("dflash:step_seconds", seconds, phase)

    def follow(self, stats: EngineStats) -> None:
        """Bring counters and gauges up to the engine's."""
        last, self._last = self._last, stats
        for field, name in _ENGINE_COUNTERS.items():
            if increase := getattr(stats, field) - getattr(last, field):
                self.count(name, increase)
        before = last.num_accepted_tokens_per_pos or [0] * len(stats.num_accepted_tokens_per_pos)
        for position, (old, new) in enumerate(zip(before, stats.num_accepted_tokens_per_pos, strict=True)):
            if new > old:
                self.count("dflash:spec_decode_num_accepted_tokens_per_pos_total", new - old, str(position))
        for field, name in _ENGINE_GAUGES.items():
            self._gauges[name] = getattr(stats, field)

    def set(self, name: str, value: float) -> None:
        """Set a gauge of this engine."""
        self._gauges[name] = value

    def forget_engine(self) -> None:
        """The engine is gone: its gauges fall to 0, and the counters of the next one start there."""
        self._last = EngineStats()
        for spec in METRICS:
            if spec.kind == "gauge":
                self._gauges[spec.name] = 0.0

    def flush(self) -> None:
        """Hand over what has changed since the last time. What Triton does not take waits for the next time; the log
        says so once."""
        with self._counts_lock:
            counts, self._counts = self._counts, defaultdict(float)
        for (name, label), amount in counts.items():
            if not self._tell(name, label, "increment", amount):
                self.count(name, amount, label)
        # Also those that have not changed: while a model is replaced, two instances of the same name set one gauge.
        for name, value in self._gauges.items():
            self._tell(name, self._engine, "set", value)
        observations, self._observations = self._observations, []
        for name, label, value in observations:
            self._tell(name, label, "observe", value)

    def _tell(self, name: str, label: str, action: str, value: float) -> bool:
        """Do `action` of a metric; False when Triton did not take it."""
        try:
            getattr(self._metric(name, label), action)(value)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises: a figure is missing, and no more
            if not self._has_failed:
                self._log(f"metrics could not be handed to Triton: {error}")
            self._has_failed = True
            return False
        return True

    def _declare(self, spec: MetricSpec) -> None:
        """Make the metric's family; metrics without a further label are on the page from the start."""
        kinds = self._pb.MetricFamily
        if spec.kind == "histogram" and not self._has_histograms:
            for part, words in (("_sum", "sum in seconds"), ("_count", "number of observations")):
                self._declare(MetricSpec(spec.name + part, "counter", f"{spec.help}: {words}", spec.label))
            return
        kind = {"counter": kinds.COUNTER, "gauge": kinds.GAUGE}.get(spec.kind) or kinds.HISTOGRAM
        self._specs[spec.name] = spec
        self._families[spec.name] = kinds(name=spec.name, description=spec.help, kind=kind)
        if spec.kind == "gauge":
            self._metric(spec.name, self._engine)
        elif not spec.label:
            self._metric(spec.name, "")

    def _metric(self, name: str, label: str) -> Any:
        metric = self._metrics.get((name, label))
        if metric is None:
            spec = self._specs[name]
            labels = {"model": self._model}
            if spec.label:
                labels[spec.label] = label
            options = {"buckets": list(spec.buckets)} if spec.kind == "histogram" else {}
            metric = self._metrics[name, label] = self._families[name].Metric(labels=labels, **options)
        return metric
