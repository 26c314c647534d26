"""One picture of a run over time. Called by `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from load_tests.result import RunResult
from load_tests.timeline import ServerSecond, UserWindow, server_windows

matplotlib.use("Agg")
from matplotlib import pyplot

NAN = float("nan")


def plot_run(
    result: RunResult, seconds: Sequence[ServerSecond], windows: Sequence[UserWindow], title: str, path: Path
) -> None:
    """Throughput, queue, latencies, cache, acceptance, KV usage, memory and CPU, one below the other; `title` says what
    was run and what came of it."""
    figure, axes = pyplot.subplots(4, 2, figsize=(14, 14), sharex=True, constrained_layout=True)
    figure.suptitle(title, fontsize=10)
    shares = server_windows(result.observations)
    panels: list[Callable[[Any], None]] = [
        lambda axis: _throughput(axis, windows),
        lambda axis: _queue(axis, seconds),
        lambda axis: _percentiles(axis, windows, "time to first token [ms]", "ttft"),
        lambda axis: _percentiles(axis, windows, "inter-token, between responses [ms]", "gap"),
        lambda axis: _hit_rate(axis, shares, result),
        lambda axis: _lines(axis, shares, "acceptance length", acceptance_length="server"),
        lambda axis: _cpu(axis, seconds),
        lambda axis: _memory(axis, seconds),
    ]
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel(axis)
        for span in result.phases[1:]:
            axis.axvline(span.start_s, color="grey", linestyle=":", linewidth=1)
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="best")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _lines(axis: Any, rows: Sequence[Any], title: str, scale: float = 1.0, **labels: str) -> None:
    """A line for each field, by its label."""
    axis.set_title(title, fontsize=10)
    for field, label in labels.items():
        values = [NAN if (value := getattr(row, field)) is None else value * scale for row in rows]
        axis.plot([row.at_s for row in rows], values, label=label, linewidth=1.2)


def _throughput(axis: Any, windows: Sequence[UserWindow]) -> None:
    _lines(axis, windows, "throughput, as users see it", tokens_per_s="tokens/s")
    other = axis.twinx()
    times = [window.at_s for window in windows]
    other.plot(times, [window.finished_per_s for window in windows], color="tab:green", label="right answers/s")
    other.plot(times, [window.refused / window.seconds for window in windows], color="tab:orange", label="refused/s")
    bad = [(window.wrong + window.errors) / window.seconds for window in windows]
    other.plot(times, bad, color="tab:red", label="wrong or failed/s")
    axis.set_ylabel("tokens/s")
    _right_axis(other, "answers/s")


def _right_axis(axis: Any, label: str) -> None:
    axis.set_ylim(bottom=0)
    axis.set_ylabel(label)
    axis.legend(fontsize=8, loc="lower right")


def _queue(axis: Any, seconds: Sequence[ServerSecond]) -> None:
    title = "requests (left), KV usage (right)"
    _lines(axis, seconds, title, running="running", waiting="waiting", preemptions="preempted")
    axis.set_ylabel("requests")
    other = axis.twinx()
    usage = [NAN if row.kv_usage is None else row.kv_usage * 100 for row in seconds]
    other.plot([row.at_s for row in seconds], usage, color="tab:red", linewidth=1.2, label="KV usage")
    other.set_ylim(top=100)
    _right_axis(other, "% of the pool")


def _percentiles(axis: Any, windows: Sequence[UserWindow], title: str, what: str) -> None:
    _lines(axis, windows, title, 1000.0, **{f"{what}_p50_s": "median", f"{what}_p99_s": "p99"})


def _hit_rate(axis: Any, shares: Sequence[ServerSecond], result: RunResult) -> None:
    _lines(axis, shares, "prefix cache hit rate [%]", 100.0, hit_rate="measured")
    if result.ideal is not None:
        axis.axhline(result.ideal.rate * 100, color="black", linestyle="--", linewidth=1, label="ideal, whole run")


def _cpu(axis: Any, seconds: Sequence[ServerSecond]) -> None:
    _lines(axis, seconds, "CPU [cores]", server_cores="server", load_generator_cores="load generator")


def _memory(axis: Any, seconds: Sequence[ServerSecond]) -> None:
    title = "resident memory [MiB]"
    _lines(axis, seconds, title, stub_rss_mib="stub", engine_rss_mib="engine", server_rss_mib="server")
