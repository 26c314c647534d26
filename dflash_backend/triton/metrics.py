"""The metrics of docs/operators.md, on Triton's metrics port.

Each value costs a round trip to Triton's process, so values are gathered here and handed over now and then. All places
that a new metric goes to are in docs/architecture.md, "Where things are added".

Triton's own histograms take one observation a call. They serve where a request has one observation, since a histogram
of few observations costs fewer calls that way. Any other histogram, and on an old Triton each, is made of counters:
`_sum`, `_count` and, by the label `le`, `_bucket`, as Prometheus stores one. On the page they look the same.

A model with several instances has several stub processes, and Triton gives those that declare the same name and labels
one value between them. Counters and histograms are added to, so they are the model's sums. A gauge is set, so each
engine has its own, told apart by the label `engine`; what one instance with several engines says of itself has the
instance's name there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

from dflash_backend.messages import EngineStats
from dflash_backend.triton.metric_specs import (
    FOLLOWING,
    INFINITY,
    INSTANCE_GAUGES,
    METRICS,
    SMALL_FAMILY,
    VLLM_GAUGES,
    VLLM_NAMES,
    MetricSpec,
)


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
        engines: Sequence[str] = (),
    ) -> None:
        """`engine` names this instance of the model, `engines` its engines, by default one of the instance's name;
        `version` is the model's. `log` is called once when Triton takes
        no values. Without `enabled` nothing reaches Triton, and no metric is on its page. With `vllm_names` the metrics
        of `VLLM_NAMES` are there under both names."""
        self._pb = pb_utils
        self._labels = {"model": model_name, "version": version}
        self._instance = engine
        self.engines = engines or (engine,)
        self._log = log
        self._enabled = enabled
        self._has_failed = False
        self._specs = {spec.name: spec for spec in METRICS}
        self._aliases: dict[str, str] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str, str], Any] = {}
        self._counts_lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        # By the gauge's name and its engine's.
        self._gauges: dict[tuple[str, str], float] = {}
        self._told_gauges: dict[tuple[str, str], float] = {}
        self._histograms: dict[tuple[str, str], _Histogram] = {}
        # The observations of Triton's own histograms.
        self._observations: defaultdict[str, list[float]] = defaultdict(list)
        self._has_histograms = hasattr(pb_utils.MetricFamily, "HISTOGRAM")
        self._last = [EngineStats() for _ in self.engines]
        self._has_vllm_gauges = False
        if enabled:
            self._declare_all(vllm_names)

    def _declare_all(self, vllm_names: bool) -> None:
        """Make the families of all metrics, but for those whose labels come later."""
        self._has_vllm_gauges = vllm_names
        for spec in METRICS:
            has_alias = vllm_names and spec.name in VLLM_NAMES
            # Clients of vLLM's backend look for its metrics as soon as they have their answer.
            declared = replace(spec, of_steps=False) if has_alias else spec
            if not spec.more_labels:
                self._declare(declared)
            if has_alias:
                # Made again under the other name, which follows the first.
                alias = VLLM_NAMES[spec.name]
                self._declare(replace(declared, name=alias))
                parts = [part for part in ("", "_sum", "_count", "_bucket") if spec.name + part in self._families]
                self._aliases |= {spec.name + part: alias + part for part in parts}
            elif vllm_names and spec.name in VLLM_GAUGES:
                self._declare(replace(spec, name=VLLM_GAUGES[spec.name]))

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter."""
        if self._enabled:
            with self._counts_lock:
                self._add(name, label, "", amount)

    def _add(self, name: str, label: str, bound: str, amount: float) -> None:
        """Add to a counter, and to that of the other name if it has one. Under the lock."""
        self._counts[name, label, bound] += amount
        if name in self._aliases:
            self._counts[self._aliases[name], label, bound] += amount

    def observe(self, name: str, value: float, label: str = "", times: int = 1) -> None:
        """Add an observation to a histogram, or several alike."""
        if not self._enabled:
            return
        if self._is_native(self._specs[name]):
            for each in filter(None, (name, self._aliases.get(name))):
                self._observations[each] += [value] * times
            return
        histogram = self._histograms.get((name, label))
        if histogram is None:
            histogram = self._histograms[name, label] = _Histogram(self._specs[name].buckets)
        histogram.observe(value, times)

    def observe_step(self, phase_seconds: Mapping[str, float]) -> None:
        """Add the times of an engine step's phases."""
        for phase, seconds in phase_seconds.items():
            self.observe("dflash:step_seconds", seconds, phase)

    def follow(self, stats: EngineStats, index: int = 0) -> None:
        """Bring counters and gauges up to those of the engine with this number."""
        last, self._last[index] = self._last[index], stats
        for spec in FOLLOWING:
            before = spec.numbers(last)
            for label, number in spec.numbers(stats).items():
                if spec.kind == "gauge":
                    self.set(spec.name, number, index)
                elif increase := number - before.get(label, 0):
                    self.count(spec.name, increase, label)
        self._follow_vllm()

    def _follow_vllm(self) -> None:
        """Bring the gauges of vLLM's names up to those of all engines."""
        if not self._has_vllm_gauges:
            return
        for name, alias in VLLM_GAUGES.items():
            values = [self._gauges.get((name, engine), 0.0) for engine in self.engines]
            self.set(alias, sum(values) / (len(values) if alias.endswith("_perc") else 1))

    def inform(self, name: str, values: Sequence[str]) -> None:
        """Show a gauge with `more_labels`, which has the value 1, in place of the one before; under vLLM's name too
        where those are."""
        if not self._enabled:
            return
        spec = self._specs[name]
        labels = {**self._labels, spec.label: self._instance, **dict(zip(spec.more_labels, values, strict=True))}
        kinds = self._pb.MetricFamily
        alias = (name.replace("dflash:", "vllm:", 1),) if self._has_vllm_gauges else ()
        for each in (name, *alias):
            try:
                if each not in self._families:
                    self._families[each] = kinds(name=each, description=spec.help, kind=kinds.GAUGE)
                # Triton removes what is no longer referred to.
                self._metrics[each, "", ""] = self._families[each].Metric(labels=labels)
            except Exception as error:  # noqa: BLE001 - as in `_tell`
                self._note_failure(error)
                continue
            self._tell((each, "", ""), "set", 1.0)

    def set(self, name: str, value: float, index: int | None = None) -> None:
        """Set a gauge of the engine with this number; None: of this instance."""
        self._gauges[name, self._instance if index is None else self.engines[index]] = value

    def reset_engines(self) -> None:
        """All engines are gone."""
        for index in range(len(self.engines)):
            self.reset_engine(index)

    def reset_engine(self, index: int = 0) -> None:
        """The engine is gone: its gauges fall to 0, and the counters of the next one start there."""
        self._last[index] = EngineStats()
        gauges = [spec.name for spec in FOLLOWING if spec.kind == "gauge"]
        for name in (*gauges, "dflash:engine_ready", "dflash:engine_silence_seconds"):
            self.set(name, 0.0, index)
        self._follow_vllm()

    def flush(self) -> None:
        """Hand over what has changed since the last time. What Triton does not take waits for the next time; the log
        says so once."""
        self._flush(of_steps=True)
        # Also those that have not changed: while a model is replaced, two instances of the same name set one gauge.
        self._tell_gauges(self._gauges)

    def flush_requests(self) -> None:
        """Hand over what has changed, but for the metrics of steps, which wait for `flush`."""
        self._flush(of_steps=False)
        self._tell_gauges({key: value for key, value in self._gauges.items() if self._told_gauges.get(key) != value})

    def _flush(self, of_steps: bool) -> None:
        """Hand over counters and histograms."""
        self._count_histograms(of_steps)
        with self._counts_lock:
            due = [key for key in self._counts if of_steps or not self._specs[key[0]].of_steps]
            counts = {key: self._counts.pop(key) for key in due}
        observations, self._observations = self._observations, defaultdict(list)
        for key, amount in counts.items():
            if not self._tell(key, "increment", amount):
                with self._counts_lock:
                    self._counts[key] += amount
        for name, values in observations.items():
            refused = [value for value in values if not self._tell((name, "", ""), "observe", value)]
            if refused:
                self._observations[name] += refused

    def _tell_gauges(self, gauges: Mapping[tuple[str, str], float]) -> None:
        for (name, engine), value in gauges.items():
            if self._tell((name, engine, ""), "set", value):
                self._told_gauges[name, engine] = value

    def _count_histograms(self, of_steps: bool) -> None:
        """Turn the observations into counts."""
        due = [key for key in self._histograms if of_steps or not self._specs[key[0]].of_steps]
        histograms = {key: self._histograms.pop(key) for key in due}
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
        """Do `action` of a metric, where there are any; False when Triton did not take it."""
        if not self._enabled:
            return True
        try:
            getattr(self._metric(*key), action)(value)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises: a figure is missing, and no more
            self._note_failure(error)
            return False
        return True

    def _note_failure(self, error: Exception) -> None:
        if not self._has_failed:
            self._log(f"metrics could not be handed to Triton: {error}")
        self._has_failed = True

    def _is_native(self, spec: MetricSpec) -> bool:
        """Whether one of Triton's own histograms serves."""
        return spec.per_request and self._has_histograms

    def _declare(self, spec: MetricSpec) -> None:
        """Make the metric's families; metrics without a further label are on the page from the start."""
        self._specs[spec.name] = spec
        kinds = self._pb.MetricFamily
        if self._is_native(spec):
            self._families[spec.name] = kinds(name=spec.name, description=spec.help, kind=kinds.HISTOGRAM)
            self._metric(spec.name, "")
        elif spec.kind == "histogram":
            for part, words in (("sum", "sum"), ("count", "number"), ("bucket", "number up to le")):
                buckets = spec.buckets if part == "bucket" else ()
                text = f"{spec.help}: {words} of the observations"
                self._declare(MetricSpec(f"{spec.name}_{part}", "counter", text, spec.label, buckets, spec.of_steps))
        else:
            kind = kinds.COUNTER if spec.kind == "counter" else kinds.GAUGE
            self._families[spec.name] = kinds(name=spec.name, description=spec.help, kind=kind)
            self._show(spec)

    def _show(self, spec: MetricSpec) -> None:
        """Make the metrics of a counter or gauge, unless their label has values that come later."""
        bounds = [*map(_number, spec.buckets), INFINITY] if spec.buckets else [""]
        if spec.kind == "gauge":
            for engine in (self._instance,) if spec.name in INSTANCE_GAUGES else self.engines:
                self._metric(spec.name, engine)
        elif not spec.label:
            # Of a family of so few Triton's page shows the latest first: thus +Inf is last, as on other servers' pages.
            for bound in reversed(bounds) if len(bounds) <= SMALL_FAMILY else bounds:
                self._metric(spec.name, "", bound)

    def _metric(self, name: str, label: str, bound: str = "") -> Any:
        metric = self._metrics.get((name, label, bound))
        if metric is None:
            spec = self._specs[name]
            labels = dict(self._labels)
            if spec.label:
                labels[spec.label] = label
            if bound:
                labels["le"] = bound
            buckets = {"buckets": list(spec.buckets)} if spec.kind == "histogram" else {}
            metric = self._metrics[name, label, bound] = self._families[name].Metric(labels=labels, **buckets)
        return metric


def engine_names(instance: str, num_engines: int) -> list[str]:
    """The engines of an instance in the label `engine`: of a single one the instance's own name."""
    return [instance] if num_engines == 1 else [f"{instance}-{index}" for index in range(num_engines)]


def _number(value: float) -> str:
    """A bound as Prometheus's own libraries write it: 0.005, 1, 100000."""
    return f"{value:.15g}"
