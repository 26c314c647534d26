"""The metrics of docs/operators.md, on Triton's metrics port.

Each value costs a round trip to Triton's process, so values are gathered here and handed over now and then. A new
metric is one entry in `METRICS` and a call that feeds it.

A histogram is made of counters: `_sum`, `_count` and, by the label `le`, `_bucket`, as Prometheus stores one. Triton's
own histograms take one observation a call, so a call for each token, and an old Triton has none.

A model with several instances has several stub processes, and Triton gives those that declare the same name and labels
one value between them. Counters and histograms are added to, so they are the model's sums. A gauge is set, so each
engine has its own, told apart by the label `engine`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from types import ModuleType
from typing import Any, Literal

from dflash_backend.messages import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
INFINITY = "+Inf"
# What the hash table of Triton's metrics library holds before it grows; larger families come in any order.
SMALL_FAMILY = 13


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `label` names its label besides `model` and `version`; `buckets` are a histogram's upper bounds, in
    the unit that its name ends with."""

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
    MetricSpec(
        "dflash:spec_decode_num_draft_tokens_per_pos_total",
        "counter",
        "Draft tokens at this position (0-based) that were verified, with adaptive_speculation",
        label="position",
    ),
    MetricSpec(
        "dflash:spec_decode_num_expected_tokens_per_pos_total",
        "counter",
        "Draft tokens at this position (0-based) that were expected to be accepted, with adaptive_speculation",
        label="position",
    ),
    MetricSpec(
        "dflash:spec_decode_num_steps_total",
        "counter",
        "Steps in which requests decoded that may draft, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_num_steps_without_drafts_total",
        "counter",
        "Those of them in which nothing was drafted, since it would not pay",
    ),
    MetricSpec(
        "dflash:spec_decode_num_proposed_tokens_total",
        "counter",
        "Draft tokens that were proposed, verified or not, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_num_budgeted_steps_total",
        "counter",
        "Steps that verified only the likeliest of their drafts, with adaptive_speculation",
    ),
    MetricSpec(
        "dflash:spec_decode_confidence_weight",
        "gauge",
        "How much the drafter's confidence in a draft counts, 0 for nothing, with adaptive_speculation",
        label="engine",
    ),
    MetricSpec("dflash:prompt_tokens_total", "counter", "Tokens of prompts whose answers have begun"),
    MetricSpec("dflash:generation_tokens_total", "counter", "Tokens that were sent to clients"),
    MetricSpec("dflash:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache"),
    MetricSpec("dflash:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache"),
    MetricSpec("dflash:num_preemptions_total", "counter", "Requests that gave up their blocks for others"),
    MetricSpec("dflash:grammar_requests_total", "counter", "Requests with structured output"),
    MetricSpec("dflash:grammars_compiled_total", "counter", "Grammars that were compiled"),
    MetricSpec("dflash:grammar_compile_seconds_total", "counter", "Time of compiling grammars, beside the steps"),
    MetricSpec("dflash:grammar_steps_total", "counter", "Steps in which a grammar hid tokens"),
    MetricSpec("dflash:grammar_mask_seconds_total", "counter", "The host's time of filling masks for these steps"),
    MetricSpec(
        "dflash:request_success_total", "counter", "Finished requests by finish reason", label="finished_reason"
    ),
    MetricSpec("dflash:request_errors_total", "counter", "Requests that ended in an error by status", label="status"),
    MetricSpec("dflash:engine_restarts_total", "counter", "Engine processes that were started after one had died"),
    MetricSpec("dflash:engine_ready", "gauge", "1 while the engine takes requests, else 0", label="engine"),
    MetricSpec("dflash:num_requests_running", "gauge", "Requests that run", label="engine"),
    MetricSpec("dflash:num_requests_waiting", "gauge", "Requests that wait", label="engine"),
    MetricSpec(
        "dflash:num_requests_in_flight",
        "gauge",
        "Requests that were taken and not answered to the end, whatever the engine says of them",
        label="engine",
    ),
    MetricSpec("dflash:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1", label="engine"),
    MetricSpec(
        "dflash:engine_silence_seconds",
        "gauge",
        "Time since the engine last spoke, which it does after each step and once a second without one",
        label="engine",
    ),
    MetricSpec(
        "dflash:stub_heartbeat_timestamp_seconds",
        "gauge",
        "When the thread that answers requests last brought these metrics up to date, in seconds since 1970",
        label="engine",
    ),
    MetricSpec(
        "dflash:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token", "", _SECONDS
    ),
    MetricSpec(
        "dflash:inter_token_latency_seconds",
        "histogram",
        "Time between a token and the one before it, observed for each token but the first; those that one step yields "
        "share its time",
        "",
        _TOKEN_SECONDS,
    ),
    MetricSpec(
        "dflash:request_time_per_output_token_seconds",
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
    MetricSpec("dflash:request_prompt_tokens", "histogram", "Prompt tokens of a finished request", "", _TOKENS),
    MetricSpec("dflash:request_generation_tokens", "histogram", "Tokens of a finished completion", "", _TOKENS),
    MetricSpec("dflash:request_params_n", "histogram", "Completions of a finished request", "", _COMPLETIONS),
    MetricSpec(
        "dflash:step_seconds", "histogram", "Time of an engine step's phases", label="phase", buckets=_STEP_SECONDS
    ),
)

# Counters of the engine, by the field of `EngineStats` that they follow. Tokens of prompts and answers are counted on
# this side: a prompt once for all its completions, and an answer without the tokens past a stop string.
_ENGINE_COUNTERS = {
    "prefix_cache_queries": "dflash:prefix_cache_queries_total",
    "prefix_cache_hits": "dflash:prefix_cache_hits_total",
    "num_preemptions": "dflash:num_preemptions_total",
}
# What Triton's vLLM backend publishes, by the metric here that counts the same: for dashboards and tests made for it.
VLLM_NAMES = {
    "dflash:prompt_tokens_total": "vllm:prompt_tokens_total",
    "dflash:generation_tokens_total": "vllm:generation_tokens_total",
    "dflash:time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "dflash:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "dflash:e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "dflash:request_prompt_tokens": "vllm:request_prompt_tokens",
    "dflash:request_generation_tokens": "vllm:request_generation_tokens",
    "dflash:request_params_n": "vllm:request_params_n",
}
# The same, by the field of `GrammarStats`.
_GRAMMAR_COUNTERS = {
    "num_requests": "dflash:grammar_requests_total",
    "num_compiled": "dflash:grammars_compiled_total",
    "compile_seconds": "dflash:grammar_compile_seconds_total",
    "num_mask_steps": "dflash:grammar_steps_total",
    "mask_seconds": "dflash:grammar_mask_seconds_total",
}
_ENGINE_GAUGES = {
    "num_requests_running": "dflash:num_requests_running",
    "num_requests_waiting": "dflash:num_requests_waiting",
    "kv_cache_usage": "dflash:kv_cache_usage_perc",
}
_CONFIDENCE_WEIGHT = "dflash:spec_decode_confidence_weight"


class _Histogram:
    """Observations since the last time they were taken: how many fell into each bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.in_bucket = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self.in_bucket[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """For each upper bound, as text, the observations that are not above it."""
        return list(zip([*map(_number, self.bounds), INFINITY], accumulate(self.in_bucket), strict=True))


class Metrics:
    """Gathers values; `flush` hands them to Triton. Any thread may `count`; the rest belongs to one."""

    def __init__(
        self,
        pb_utils: ModuleType,
        model_name: str,
        engine: str,
        log: Callable[[str], None],
        version: str = "1",
        enabled: bool = True,
        vllm_names: bool = False,
    ) -> None:
        """`engine` names this instance of the model, `version` is the model's. `log` is called once when Triton takes
        no values. Without `enabled` nothing reaches Triton, and no metric is on its page. With `vllm_names` the metrics
        of `VLLM_NAMES` are there under both names."""
        self._pb = pb_utils
        self._labels = {"model": model_name, "version": version}
        self._engine = engine
        self._log = log
        self._enabled = enabled
        self._has_failed = False
        self._specs = {spec.name: spec for spec in METRICS}
        self._aliases: dict[str, str] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str, str], Any] = {}
        self._counts_lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._histograms: dict[tuple[str, str], _Histogram] = {}
        self._last = EngineStats()
        if enabled:
            for spec in METRICS:
                self._declare(spec)
                if vllm_names and spec.name in VLLM_NAMES:
                    self._declare_alias(spec, VLLM_NAMES[spec.name])

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        with self._counts_lock:
            self._add(name, label, "", amount)

    def _add(self, name: str, label: str, bound: str, amount: float) -> None:
        """Add to a counter, and to that of the other name if it has one. Under the lock."""
        self._counts[name, label, bound] += amount
        if name in self._aliases:
            self._counts[self._aliases[name], label, bound] += amount

    def observe(self, name: str, value: float, label: str = "", times: int = 1) -> None:
        """Add an observation to a histogram, or several alike."""
        histogram = self._histograms.get((name, label))
        if histogram is None:
            histogram = self._histograms[name, label] = _Histogram(self._specs[name].buckets)
        histogram.observe(value, times)

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
        for field, name in _GRAMMAR_COUNTERS.items():
            if increase := getattr(stats.grammars, field) - getattr(last.grammars, field):
                self.count(name, increase)
        drafted = stats.spec_decoding - last.spec_decoding
        for field in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            if increase := getattr(drafted, field):
                self.count(f"dflash:spec_decode_{field}_total", increase)
        for position, increase in enumerate(drafted.num_accepted_tokens_per_pos):
            if increase:
                self.count("dflash:spec_decode_num_accepted_tokens_per_pos_total", increase, str(position))
        for field in ("num_steps", "num_steps_without_drafts", "num_proposed_tokens", "num_budgeted_steps"):
            if increase := getattr(stats.speculation, field) - getattr(last.speculation, field):
                self.count(f"dflash:spec_decode_{field}_total", increase)
        for field in ("num_draft_tokens_per_pos", "num_expected_tokens_per_pos"):
            pairs = zip_longest(getattr(stats.speculation, field), getattr(last.speculation, field), fillvalue=0)
            for position, (now, before) in enumerate(pairs):
                if now != before:
                    self.count(f"dflash:spec_decode_{field}_total", now - before, str(position))
        for field, name in _ENGINE_GAUGES.items():
            self._gauges[name] = getattr(stats, field)
        self._gauges[_CONFIDENCE_WEIGHT] = stats.speculation.confidence_weight

    def set(self, name: str, value: float) -> None:
        """Set a gauge of this engine."""
        self._gauges[name] = value

    def reset_engine(self) -> None:
        """The engine is gone: its gauges fall to 0, and the counters of the next one start there."""
        self._last = EngineStats()
        others = (_CONFIDENCE_WEIGHT, "dflash:engine_ready", "dflash:engine_silence_seconds")
        for name in (*_ENGINE_GAUGES.values(), *others):
            self._gauges[name] = 0.0

    def flush(self) -> None:
        """Hand over what has changed since the last time. What Triton does not take waits for the next time; the log
        says so once."""
        self._count_histograms()
        with self._counts_lock:
            counts, self._counts = self._counts, defaultdict(float)
        if not self._enabled:
            return
        for key, amount in counts.items():
            if not self._tell(key, "increment", amount):
                with self._counts_lock:
                    self._counts[key] += amount
        # Also those that have not changed: while a model is replaced, two instances of the same name set one gauge.
        for name, value in self._gauges.items():
            self._tell((name, self._engine, ""), "set", value)

    def _count_histograms(self) -> None:
        """Turn the observations into counts."""
        histograms, self._histograms = self._histograms, {}
        with self._counts_lock:
            for (name, label), histogram in histograms.items():
                buckets = histogram.cumulative()
                for bound, number in buckets:
                    # Also by 0 for a new one: all buckets of a histogram are on the page, or a quantile is wrong.
                    if number or (f"{name}_bucket", label, bound) not in self._metrics:
                        self._add(f"{name}_bucket", label, bound, number)
                self._add(f"{name}_sum", label, "", histogram.sum)
                self._add(f"{name}_count", label, "", buckets[-1][1])

    def _tell(self, key: tuple[str, str, str], action: str, value: float) -> bool:
        """Do `action` of a metric; False when Triton did not take it."""
        try:
            getattr(self._metric(*key), action)(value)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises: a figure is missing, and no more
            if not self._has_failed:
                self._log(f"metrics could not be handed to Triton: {error}")
            self._has_failed = True
            return False
        return True

    def _declare(self, spec: MetricSpec) -> None:
        """Make the metric's families; metrics without a further label are on the page from the start."""
        self._specs[spec.name] = spec
        if spec.kind == "histogram":
            for part, words in (("sum", "sum"), ("count", "number"), ("bucket", "number up to le")):
                name, text = f"{spec.name}_{part}", f"{spec.help}: {words} of the observations"
                self._declare(MetricSpec(name, "counter", text, spec.label, spec.buckets if part == "bucket" else ()))
            return
        kinds = self._pb.MetricFamily
        kind = kinds.COUNTER if spec.kind == "counter" else kinds.GAUGE
        self._families[spec.name] = kinds(name=spec.name, description=spec.help, kind=kind)
        bounds = [*map(_number, spec.buckets), INFINITY] if spec.buckets else [""]
        if spec.kind == "gauge":
            self._metric(spec.name, self._engine)
        elif not spec.label:
            # Of a family of so few Triton's page shows the latest first: thus +Inf is last, as on other servers' pages.
            for bound in reversed(bounds) if len(bounds) <= SMALL_FAMILY else bounds:
                self._metric(spec.name, "", bound)

    def _declare_alias(self, spec: MetricSpec, alias: str) -> None:
        """Make the families of a counter or a histogram again under another name, which follows the first."""
        self._declare(replace(spec, name=alias))
        for part in ("", "_sum", "_count", "_bucket"):
            if spec.name + part in self._families:
                self._aliases[spec.name + part] = alias + part

    def _metric(self, name: str, label: str, bound: str = "") -> Any:
        metric = self._metrics.get((name, label, bound))
        if metric is None:
            spec = self._specs[name]
            labels = dict(self._labels)
            if spec.label:
                labels[spec.label] = label
            if bound:
                labels["le"] = bound
            metric = self._metrics[name, label, bound] = self._families[name].Metric(labels=labels)
        return metric


def _number(value: float) -> str:
    """A bound as Prometheus's own libraries write it: 0.005, 1, 100000."""
    return f"{value:.15g}"
