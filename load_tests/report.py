"""Writes a run to its folder: summary as JSON and Markdown, time series, every request, wrong answers, the picture."""

from __future__ import annotations

import csv
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tests.plots import plot_run
from load_tests.result import WAITING, RunResult, gaps, percentile, ttfts
from load_tests.timeline import server_seconds, user_windows, write_csv
from load_tests.verdict import Bound, word

# From this share of a core on, or this lateness, what is measured may be the load generator: it has one interpreter.
BUSY_CORES = 0.8
LATE_S = 0.1
# From this share of all processors on, other programs took so much that times say little about the server.
STARVED_SHARE = 0.25
REQUEST_FIELDS = (
    "phase",
    "traffic",
    "question",
    "salt",
    "measured",
    "sent_s",
    "first_s",
    "ended_s",
    "num_tokens",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_drafts",
    "num_accepted",
    "outcome",
    "status",
)


def write_report(result: RunResult, bounds: Sequence[Bound], directory: Path) -> None:
    """Write everything but locust's own files, which are there already."""
    seconds, windows = server_seconds(result.observations), user_windows(result)
    write_csv(seconds, directory / "server.csv")
    write_csv(windows, directory / "users.csv")
    _write_requests(result, directory / "requests.csv")
    with (directory / "wrong.jsonl").open("w", encoding="utf-8") as file:
        for wrong in result.recorder.wrong:
            file.write(json.dumps(asdict(wrong), ensure_ascii=False) + "\n")
    summary = summarise(result, bounds)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "summary.md").write_text(markdown(result, bounds), encoding="utf-8")
    plot_run(result, seconds, windows, heading(result, bounds), directory / "run.png")


def summarise(result: RunResult, bounds: Sequence[Bound]) -> dict[str, Any]:
    """The run as JSON. Times in seconds."""
    options = result.options
    return {
        "scenario": result.scenario.name,
        "verdict": verdict_word(result, bounds),
        "bounds": [{**asdict(bound), "verdict": bound.verdict} for bound in bounds],
        "options": {**asdict(options), "settings": dict(options.settings)},
        "settings": result.settings,
        "duration_s": result.duration_s,
        "phases": [asdict(span) for span in result.phases],
        "requests": {name: result.count(name) for name in ("right", "wrong", "cancelled", "refused", "error")},
        "tokens_per_s": result.tokens_per_s,
        "right_answers_per_s": result.requests_per_s,
        "latencies_s": dict(latencies(result)),
        "acceptance_length": result.acceptance_length(),
        "hit_rate": result.hit_rate(),
        "ideal_hit_rate": None if result.ideal is None else result.ideal.rate,
        "ideal_hit_rate_of_this_pool": None if result.ideal_bounded is None else result.ideal_bounded.rate,
        "num_kv_blocks": result.num_kv_blocks,
        "load_generator": {
            "cores": result.own_cpu_share,
            "late_p99_s": result.lag(0.99),
            "note": generator_note(result),
        },
        "machine": {"others_cores": result.others_cpu_share, "note": machine_note(result)},
    }


def latencies(result: RunResult) -> list[tuple[str, dict[str, float | None]]]:
    """Percentiles of the measured requests, by what was measured, for each phase and traffic."""
    kinds = sorted({(sample.phase, sample.traffic) for sample in result.measured()})
    rows = []
    for phase, traffic in kinds:
        chosen = result.measured(phase, traffic)
        label = f"{phase} / {traffic}"
        rows.append((f"{label}: first token", _percentiles(ttfts(chosen))))
        rows.append((f"{label}: between responses", _percentiles(gaps(chosen))))
        whole = [sample.ended_s - sample.sent_s for sample in chosen if sample.outcome == "right"]
        rows.append((f"{label}: whole answer", _percentiles(whole)))
    return rows


def verdict_word(result: RunResult, bounds: Sequence[Bound]) -> str:
    """The verdict on a run, as `load_tests.verdict.word` has it."""
    return word(result.complete, bounds)


def generator_note(result: RunResult) -> str:
    """What the load generator itself cost, and whether it may have been in the way."""
    cores, late = result.own_cpu_share, result.lag(0.99)
    if cores is None or late is None:
        return "the load generator's own share was not measured"
    busy = cores > BUSY_CORES or late > LATE_S
    judgement = "it may have been the bottleneck: trust no latency of this run" if busy else "it was not the bottleneck"
    return (
        f"the load generator used {cores:.2f} cores and was late by {late * 1e3:.0f} ms (p99 over seconds); {judgement}"
    )


def machine_note(result: RunResult) -> str:
    """Whether other programs took the processors away; empty when they did not, or it was not seen."""
    others, cores = result.others_cpu_share, os.cpu_count() or 1
    if others is None or others < STARVED_SHARE * cores:
        return ""
    return (
        f"the machine was starved: other programs used {others:.1f} of its {cores} cores; judge no time and no "
        "throughput by this run"
    )


def heading(result: RunResult, bounds: Sequence[Bound]) -> str:
    """What was run and what came of it, for the picture."""
    options = result.options
    settings = ", ".join(f"{name}={value}" for name, value in result.settings.items()) or "default settings"
    return "\n".join(
        [
            f"{result.scenario.name}: {verdict_word(result, bounds)} ({options.users} users, "
            f"{result.duration_s:.0f} s, {options.protocol}, seed {options.seed})",
            result.scenario.summary,
            *textwrap.wrap(settings, 150)[:3],
        ]
    )


def lines(result: RunResult, bounds: Sequence[Bound]) -> list[str]:
    """The run in a few lines, for the terminal."""
    counts = ", ".join(f"{result.count(name)} {name}" for name in ("right", "wrong", "cancelled", "refused", "error"))
    acceptance = result.acceptance_length()
    said = [
        f"{result.scenario.name}: {len(result.samples)} requests in {result.duration_s:.0f} s: {counts}",
        f"throughput: {result.tokens_per_s:.0f} tokens/s, {result.requests_per_s:.1f} right answers/s",
    ]
    if acceptance is not None:
        said.append(f"acceptance length: {acceptance:.3f}")
    measured = result.hit_rate()
    if measured is not None and result.ideal is not None:
        said.append(f"prefix cache hit rate: {measured * 100:.2f} %, unbounded cache {result.ideal.rate * 100:.2f} %")
    for name, values in latencies(result):
        if values["p50"] is not None:
            said.append(f"{name}: " + ", ".join(f"{key} {_ms(value)}" for key, value in values.items()))
    said.append(generator_note(result))
    if machine_note(result):
        said.append(machine_note(result))
    waiting = result.peak(WAITING)
    if waiting:
        said.append(f"most requests that waited for a place at one time: {waiting:.0f}")
    said += [bound.line() for bound in bounds]
    said.append(f"verdict: {verdict_word(result, bounds)}")
    return said


def markdown(result: RunResult, bounds: Sequence[Bound]) -> str:
    """The run as a page."""
    options = result.options
    settings = ", ".join(f"`{name}={value}`" for name, value in result.settings.items()) or "the defaults"
    table = ["| bound | measured | allowed | verdict | |", "| --- | --- | --- | --- | --- |"]
    for bound in bounds:
        measured = "-" if bound.measured is None else f"{bound.measured:.4g} {bound.unit}".strip()
        allowed = f"{bound.kind} {bound.limit:g} {bound.unit}".strip()
        table.append(f"| {bound.name} | {measured} | {allowed} | {bound.verdict} | {bound.note} |")
    times = ["| | p50 | p90 | p99 | max |", "| --- | --- | --- | --- | --- |"]
    times += [f"| {name} | {' | '.join(map(_ms, values.values()))} |" for name, values in latencies(result)]
    return "\n".join(
        [
            f"# {result.scenario.name}: {verdict_word(result, bounds)}",
            "",
            f"{result.scenario.summary}. What it shows: {result.scenario.shows}.",
            "",
            f"{options.users} users, {result.duration_s:.0f} s, {options.protocol}, seed {options.seed}; "
            f"server: {settings}.",
            "",
            *table,
            "",
            *(f"- {line}" for line in lines(result, [])[:-1]),
            "",
            *times,
            "",
            "![over time](run.png)",
            "",
        ]
    )


def _percentiles(values: list[float]) -> dict[str, float | None]:
    return {
        name: percentile(values, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _write_requests(result: RunResult, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(REQUEST_FIELDS)
        for sample in result.samples:
            values = [getattr(sample, name) for name in REQUEST_FIELDS]
            writer.writerow([round(value, 5) if isinstance(value, float) else value for value in values])
