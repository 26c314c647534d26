"""One picture of a run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from load_tests.result import RunResult
from load_tests.timeline import ServerSecond, in_windows, percentiles, server_windows

matplotlib.use("Agg")
from matplotlib import pyplot


def plot_run(result: RunResult, seconds: Sequence[ServerSecond], title: str, path: Path) -> None:
    """Throughput, queue, latencies, cache, acceptance, KV usage, memory and CPU, one below the other."""
    figure, axes = pyplot.subplots(4, 2, figsize=(14, 14), sharex=True, constrained_layout=True)
    figure.suptitle(title, fontsize=10)
    throughput, queue, ttft, gap, hit_rate, acceptance, cpu, memory = axes.flat
    windows = server_windows(result.observations)
    begun = [(sample.first_s, sample) for sample in result.samples if sample.first_s is not None]
    first = [(first_s, first_s - sample.sent_s) for first_s, sample in begun]
    gaps = [(at_s, gap) for _, one in begun for at_s, gap in zip(one.gap_ends(), one.gaps, strict=True)]
    _throughput(throughput, result)
    _queue(queue, seconds)
    _percentiles(ttft, first, result.duration_s, "time to first token [ms]")
    _percentiles(gap, gaps, result.duration_s, "inter-token, between responses [ms]")
    _lines(hit_rate, windows, "prefix cache hit rate [%]", 100.0, hit_rate="measured")
    if result.ideal is not None:
        hit_rate.axhline(result.ideal.rate * 100, color="black", linestyle="--", linewidth=1, label="ideal, whole run")
    _lines(acceptance, windows, "acceptance length", acceptance_length="server")
    _lines(cpu, seconds, "CPU [cores]", server_cores="server", load_generator_cores="load generator")
    _lines(
        memory, seconds, "resident memory [MiB]", stub_rss_mib="stub", engine_rss_mib="engine", server_rss_mib="server"
    )
    for axis in axes.flat:
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


def _lines(axis: Any, rows: Sequence[ServerSecond], title: str, scale: float = 1.0, **labels: str) -> None:
    """A line for each field, with its label."""
    axis.set_title(title, fontsize=10)
    for field, label in labels.items():
        values = [float("nan") if (value := getattr(row, field)) is None else value * scale for row in rows]
        axis.plot([row.at_s for row in rows], values, label=label, linewidth=1.2)


def _throughput(axis: Any, result: RunResult) -> None:
    axis.set_title("throughput, as users see it", fontsize=10)
    tokens = [(float(second), float(count)) for second, count in result.recorder.tokens_by_second.items()]
    times, values = in_windows(tokens, result.duration_s)
    seconds = max(1, times[1] if len(times) > 1 else 1)
    axis.plot(times, [sum(window) / seconds for window in values], label="tokens/s", linewidth=1.2)
    other = axis.twinx()
    for label, outcomes, color in (
        ("right answers/s", ["right"], "tab:green"),
        ("refused/s", ["refused"], "tab:orange"),
        ("wrong or failed/s", ["wrong", "error"], "tab:red"),
    ):
        ended = [(sample.ended_s, 1.0) for sample in result.samples if sample.outcome in outcomes]
        other.plot(
            times, [len(window) / seconds for window in in_windows(ended, result.duration_s)[1]], color, label=label
        )
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
    usage = [row.kv_usage * 100 for row in seconds]
    other.plot([row.at_s for row in seconds], usage, color="tab:red", linewidth=1.2, label="KV usage")
    other.set_ylim(top=100)
    _right_axis(other, "% of the pool")


def _percentiles(axis: Any, points: Sequence[tuple[float, float]], duration_s: float, title: str) -> None:
    axis.set_title(title, fontsize=10)
    times, values = in_windows(points, duration_s)
    for share, label in ((0.5, "median"), (0.99, "p99")):
        axis.plot(times, [seconds * 1000 for seconds in percentiles(values, share)], label=label, linewidth=1.2)
