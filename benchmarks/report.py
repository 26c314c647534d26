"""Writes what a benchmark measured: a table in Markdown, JSON and a plot."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import HostShare, Measurement
from benchmarks.prefix import PrefixMeasurement
from load_tests.markdown import markdown_table

BASELINE = "transformers"
NO_DRAFT = "engine, k = 0"
DFLASH = "engine, DFlash"
TRITON = "Triton, DFlash"


@dataclass(frozen=True)
class Runs:
    """What one run of the benchmark measured.

    runs: the fastest measurement of each system at each number of streams. through_ratio: tokens per second through
    Triton over those in-process at the most streams, the median of through_ratios, one for each pair of measurements.
    host: the host's own share of a step of the engine with DFlash at the most streams, in-process.
    """

    runs: list[Measurement]
    through_ratio: float
    through_ratios: list[float]
    host: HostShare


def find(runs: list[Measurement], system: str, streams: int) -> Measurement:
    """The run of a system at a number of streams."""
    return next(run for run in runs if run.system == system and run.streams == streams)


def ratios(measured: Runs) -> dict[str, float]:
    """The ratios that the project promises, from one run of the benchmark."""
    runs = measured.runs
    single = find(runs, BASELINE, 1).tokens_per_s
    most = max(run.streams for run in runs)
    dflash = find(runs, DFLASH, most).tokens_per_s
    return {
        "DFlash over transformers, 1 stream": find(runs, DFLASH, 1).tokens_per_s / single,
        "DFlash over k = 0, 1 stream": find(runs, DFLASH, 1).tokens_per_s / find(runs, NO_DRAFT, 1).tokens_per_s,
        f"DFlash at {most} streams over transformers at 1": dflash / single,
        f"through Triton over in-process, {most} streams, median pair": measured.through_ratio,
    }


def agreement(runs: list[Measurement]) -> dict[str, str]:
    """For each run, how many of its outputs equal those of `transformers` at one stream, token for token."""
    reference = find(runs, BASELINE, 1).outputs
    result = {}
    for run in runs:
        same = sum(run.outputs.get(index) == tokens for index, tokens in reference.items())
        result[f"{run.system}, {run.streams} streams"] = f"{same} of {len(reference)}"
    return result


def misses(runs: list[Measurement], prefix: PrefixMeasurement) -> list[str]:
    """Which outputs are not those of `transformers`, in words. Speeds are no misses."""
    num_prompts = len(find(runs, BASELINE, 1).outputs)
    everything = f"{num_prompts} of {num_prompts}"
    found = [f"{run}: {same} outputs are equal" for run, same in agreement(runs).items() if same != everything]
    return found if prefix.outputs_equal else [*found, "a prefix hit gives another output than a miss"]


def table(runs: list[Measurement]) -> str:
    """All runs as a Markdown table."""
    agrees = agreement(runs)
    header = ("system", "streams", "tokens/s", "acceptance length", "time to first token, median")
    rows = []
    for run in runs:
        first = f"{run.first_token_p50_s * 1e3:.1f} ms" if run.first_token_p50_s is not None else "-"
        accepted = f"{run.acceptance_length:.2f}" if run.acceptance_length is not None else "-"
        same = agrees[f"{run.system}, {run.streams} streams"]
        client = f"{run.client_cpu_share:.0%}" if run.client_cpu_share is not None else "-"
        rows.append((run.system, run.streams, f"{run.tokens_per_s:.0f}", accepted, first, client, same))
    return markdown_table((*header, "client's CPU, of a core", "equal to transformers"), rows)


def ratio_table(measured: Runs, prefix: PrefixMeasurement) -> str:
    """The ratios as a Markdown table."""
    acceptance = prefix.hit_acceptance_length / prefix.miss_acceptance_length
    rows = [
        *((name, f"{value:.2f}") for name, value in ratios(measured).items()),
        (
            f"time to first token, hit over miss, prefix of {prefix.prefix_tokens} tokens",
            f"{prefix.first_token_ratio:.3f}",
        ),
        ("acceptance length, hit over miss", f"{acceptance:.3f}"),
        (host_line(measured.host), f"{measured.host.share:.3f}"),
    ]
    return markdown_table(("ratio, in one run", "measured"), rows)


def host_line(host: HostShare) -> str:
    """What the host's share is of, and what it comes to."""
    return (
        f"host's own share of a step (planning, preparation, applying, messages), {host.streams} streams: "
        f"{host.per_step_s * 1e3:.2f} of {(host.step_s + host.message_s) / host.num_steps * 1e3:.2f} ms"
    )


def write(directory: Path, measured: Runs, prefix: PrefixMeasurement, settings: dict[str, Any]) -> str:
    """Write `bench.md`, `bench.json` and `bench.png` into `directory`; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {settings['cores']} cores, torch {settings['torch']}"
    source = f"Measured by `make bench` on {machine}, {settings['prompts']} prompts."
    runs = measured.runs
    text = f"{table(runs)}\n\n{ratio_table(measured, prefix)}\n\n{source}\n"
    (directory / "bench.md").write_text(text, encoding="utf-8")
    rows = []
    for run in runs:
        row = asdict(run) | {
            "tokens_per_s": run.tokens_per_s,
            "first_token_p50_s": run.first_token_p50_s,
            "client_cpu_share": run.client_cpu_share,
        }
        del row["outputs"]
        rows.append(row)
    data = {
        "settings": settings,
        "runs": rows,
        "ratios": ratios(measured),
        "through_triton_over_in_process": measured.through_ratios,
        "equal_to_transformers": agreement(runs),
        "host": asdict(measured.host)
        | {"share": measured.host.share, "per_step_s": measured.host.per_step_s, "host_s": measured.host.host_s},
        "prefix": asdict(prefix) | {"first_token_ratio": prefix.first_token_ratio},
    }
    (directory / "bench.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    plot(directory / "bench.png", runs)
    return text


def plot(path: Path, runs: list[Measurement]) -> None:
    """Tokens per second by system and number of streams, as bars on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = list(dict.fromkeys(run.system for run in runs))
    streams = sorted({run.streams for run in runs})
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        heights = [find(runs, system, count).tokens_per_s for count in streams]
        bars = axes.bar([x + i * width for x in range(len(streams))], heights, width, label=system)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks([x + width * (len(systems) - 1) / 2 for x in range(len(streams))], [str(s) for s in streams])
    axes.set_xlabel("streams")
    axes.set_ylabel("output tokens per second")
    axes.set_yscale("log")
    axes.set_title("Demo pair on a CPU, greedy, float32")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
