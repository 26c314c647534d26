"""Writes a run to its folder: summary as JSON and Markdown, time series, every request, wrong answers, the picture."""

from __future__ import annotations

import csv
import json
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from load_tests.markdown import markdown_table
from load_tests.plots import plot_run
from load_tests.result import WAITING, RunResult, percentile, ttfts
from load_tests.samples import Outcome
from load_tests.scenario import Run
from load_tests.timeline import ServerSecond, server_seconds

# From this share of a core on, or this lateness, what is measured may be the load generator: it has one interpreter.
BUSY_CORES = 0.8
LATE_S = 0.1
# From this share of all processors on, other programs took so much that times say little about the server.
STARVED_SHARE = 0.25
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
REQUEST_FIELDS = (
    *("phase", "traffic", "question", "salt", "measured", "sent_s", "first_s", "ended_s", "num_tokens"),
    *("num_prompt_tokens", "num_cached_tokens", "num_drafts", "num_accepted", "outcome", "status"),
)


def write_report(run: Run) -> None:
    """Write everything but locust's own files, which are there already."""
    result, directory = run.result, run.directory
    seconds = server_seconds(result.observations)
    _write_csv(directory / "server.csv", [field.name for field in fields(ServerSecond)], seconds)
    _write_csv(directory / "requests.csv", REQUEST_FIELDS, result.samples)
    with (directory / "wrong.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(wrong), ensure_ascii=False) + "\n" for wrong in result.recorder.wrong)
    summary = json.dumps(summarise(run), indent=2, ensure_ascii=False)
    (directory / "summary.json").write_text(f"{summary}\n", encoding="utf-8")
    (directory / "summary.md").write_text(markdown(run), encoding="utf-8")
    plot_run(result, seconds, heading(run), directory / "run.png")


def summarise(run: Run) -> dict[str, Any]:
    """The run as JSON. Times in seconds."""
    result, options = run.result, run.options
    return {
        "scenario": run.scenario.name,
        "verdict": run.verdict,
        "bounds": [{**asdict(bound), "verdict": bound.verdict} for bound in run.bounds],
        "options": {**asdict(options), "settings": dict(options.settings)},
        "settings": result.settings,
        "duration_s": result.duration_s,
        "phases": [asdict(span) for span in result.phases],
        "requests": {outcome: result.count(outcome) for outcome in OUTCOMES},
        "tokens_per_s": result.tokens_per_s,
        "right_answers_per_s": result.requests_per_s,
        "latencies_s": latencies(result),
        "acceptance_length": result.acceptance_length(),
        "hit_rate": result.hit_rate(),
        "ideal_hit_rate": None if result.ideal is None else result.ideal.rate,
        "ideal_hit_rate_of_this_pool": None if result.ideal_bounded is None else result.ideal_bounded.rate,
        "num_kv_blocks": result.num_kv_blocks,
        "load_generator": {
            "cores": result.own_cores,
            "late_p99_s": result.lag(0.99),
            "note": generator_note(result),
        },
        "machine": {"others_cores": result.others_cores, "note": machine_note(result)},
    }


def latencies(result: RunResult) -> dict[str, dict[str, float | None]]:
    """Percentiles of the measured requests in seconds, by what was measured, for each phase and traffic:
    by when they were sent, the times between responses by when those came."""
    rows = {}
    for phase, traffic in sorted({(sample.phase, sample.traffic) for sample in result.measured()}):
        chosen = result.measured(phase, traffic)
        for what, values in (
            ("first token", ttfts(chosen)),
            ("between responses", result.gaps(phase, traffic)),
            ("whole answer", [sample.latency_s for sample in chosen if sample.outcome == "right"]),
        ):
            rows[f"{phase} / {traffic}: {what}"] = {
                name: percentile(values, share) for name, share in PERCENTILES.items()
            }
    return rows


def generator_note(result: RunResult) -> str:
    """What the load generator itself cost, and whether it may have been in the way."""
    cores, late = result.own_cores, result.lag(0.99)
    if cores is None or late is None:
        return "the load generator's own share was not measured"
    busy = cores > BUSY_CORES or late > LATE_S
    judgement = "it may have been the bottleneck: trust no latency of this run" if busy else "it was not the bottleneck"
    return (
        f"the load generator used {cores:.2f} cores and was late by {late * 1e3:.0f} ms (p99 over seconds); {judgement}"
    )


def machine_note(result: RunResult) -> str:
    """Whether other programs took the processors away; empty when they did not, or it was not seen."""
    others, cores = result.others_cores, os.cpu_count() or 1
    if others is None or others < STARVED_SHARE * cores:
        return ""
    return (
        f"the machine was starved: other programs used {others:.1f} of its {cores} cores; judge no time and no "
        "throughput by this run"
    )


def heading(run: Run) -> str:
    """What was run and what came of it, for the picture."""
    options, result = run.options, run.result
    settings = ", ".join(f"{name}={value}" for name, value in result.settings.items()) or "default settings"
    return "\n".join(
        [
            f"{run.scenario.name}: {run.verdict} ({options.users} users, {result.duration_s:.0f} s, "
            f"{options.protocol}, seed {options.seed})",
            run.scenario.summary,
            *textwrap.wrap(settings, 150)[:3],
        ]
    )


def lines(run: Run) -> list[str]:
    """The run in a few lines, for the terminal."""
    return [*_figures(run), *(bound.line() for bound in run.bounds), f"verdict: {run.verdict}"]


def markdown(run: Run) -> str:
    """The run as a page."""
    scenario, options, result = run.scenario, run.options, run.result
    settings = ", ".join(f"`{name}={value}`" for name, value in result.settings.items()) or "the defaults"
    bounds = [
        (
            bound.name,
            "-" if bound.measured is None else f"{bound.measured:.4g} {bound.unit}".strip(),
            f"{bound.kind} {bound.limit:g} {bound.unit}".strip(),
            bound.verdict,
            bound.note,
        )
        for bound in run.bounds
    ]
    times = [(name, *map(_ms, values.values())) for name, values in latencies(result).items()]
    figures = "\n".join(f"- {line}" for line in _figures(run))
    return f"""# {scenario.name}: {run.verdict}

{scenario.summary}. What it shows: {scenario.shows}.

{options.users} users, {result.duration_s:.0f} s, {options.protocol}, seed {options.seed}; server: {settings}.

{markdown_table(("bound", "measured", "allowed", "verdict", ""), bounds)}

{figures}

{markdown_table(("", *PERCENTILES), times)}

![over time](run.png)
"""


def _figures(run: Run) -> list[str]:
    result = run.result
    counts = ", ".join(f"{result.count(outcome)} {outcome}" for outcome in OUTCOMES)
    acceptance, hit_rate, waiting = result.acceptance_length(), result.hit_rate(), result.peak(WAITING)
    found = [
        f"{run.scenario.name}: {len(result.samples)} requests in {result.duration_s:.0f} s: {counts}",
        f"throughput: {result.tokens_per_s:.0f} tokens/s, {result.requests_per_s:.1f} right answers/s",
    ]
    if acceptance is not None:
        found.append(f"acceptance length: {acceptance:.3f}")
    if hit_rate is not None and result.ideal is not None:
        found.append(f"prefix cache hit rate: {hit_rate * 100:.2f} %, unbounded cache {result.ideal.rate * 100:.2f} %")
    for name, values in latencies(result).items():
        if values["p50"] is not None:
            found.append(f"{name}: " + ", ".join(f"{key} {_ms(value)}" for key, value in values.items()))
    found += filter(None, (generator_note(result), machine_note(result)))
    if waiting:
        found.append(f"most requests that waited at one time: {waiting:.0f}")
    return found


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _write_csv(path: Path, names: Sequence[str], rows: Iterable[object]) -> None:
    """A line for each row, with its attributes of these names."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([round(value, 5) if isinstance(value, float) else value for value in values])
