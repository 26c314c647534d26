"""Writes what was measured: tables in Markdown, JSON and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Cell, Results, Sample, equal_share, median, ratios
from benchmarks.peers.pairs import NONE
from benchmarks.peers.systems import OURS, OURS_HTTP, OURS_QUANTISED, SYSTEMS
from benchmarks.quiet import MOST_OTHERS
from load_tests.markdown import markdown_table

HEADER = (
    "drafts",
    "prompts",
    "streams",
    "system",
    "tokens/s",
    "this engine / it",
    "first token, ms",
    "between tokens, p99, ms",
    "acceptance length",
    "answers as ours without drafts",
)
ALIGN = "llrlrrrrrr"


def ratio_text(values: Sequence[float]) -> str:
    """The median, and the least and the most of several rounds."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def row(results: Results, cell: Cell, system: str) -> list[str]:
    """The line of a system in a cell."""
    found = results.samples[cell]
    samples, ours = found[system], found.get(SYSTEMS[system].beside, [])
    same = equal_share(samples, results.samples.get(reference(cell), {}).get(OURS, []))
    return [
        cell.drafts,
        cell.prompts,
        str(cell.streams),
        SYSTEMS[system].title,
        _number(median(samples, "tokens_per_s"), 1, 0),
        ratio_text(ratios(ours, samples)) if system not in (OURS, OURS_HTTP, OURS_QUANTISED) else "",
        _number(median(samples, "first_token_p50_s"), 1e3, 1),
        _number(median(samples, "gap_p99_s"), 1e3, 1),
        _number(median(samples, "acceptance_length"), 1, 2),
        "-" if same is None else f"{same:.0%}",
    ]


def reference(cell: Cell) -> Cell:
    """The same cell without drafts."""
    return Cell(cell.pair, NONE, cell.prompts, cell.streams)


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def tables(results: Results) -> str:
    """A table for each pair."""
    parts = []
    for pair in dict.fromkeys(cell.pair for cell in results.samples):
        rows = [
            row(results, cell, system)
            for cell, systems in results.samples.items()
            if cell.pair == pair
            for system in systems
        ]
        parts.append(f"## {pair}\n\n{markdown_table(HEADER, rows, ALIGN)}")
    return "\n\n".join(parts)


def page(results: Results, skips: Sequence[str], settings: dict[str, Any]) -> str:
    """The whole page."""
    samples = [one for cell in results.samples.values() for each in cell.values() for one in each if one is not None]
    disturbed = sum(sample.others > MOST_OTHERS for sample in samples)
    named = [f"{SYSTEMS[name].title} {version}" for name, version in results.versions.items() if version]
    versions = f"{', '.join(named)}. " if named else ""
    most = max((len(each) for cell in results.samples.values() for each in cell.values()), default=0)
    least = min((len(each) for cell in results.samples.values() for each in cell.values()), default=0)
    rounds = f"{most}" if least == most else f"{least} to {most}"
    asked = ", ".join(f"{name} {value:g}" for name, value in settings.get("sampling", {}).items())
    sampled = f"All requests sample, with {asked}. " if asked else ""
    text = (
        f"# This engine beside others\n\nOn {settings['processor']}, this engine at {settings['tree']}. Medians of "
        f"{rounds} rounds, in which the systems run in turn on {settings['threads']} threads; the ratio is that of "
        f"tokens/s, round by round, with the least and the most, of servers to ours through HTTP, of a quantised file "
        f"to ours with it. {sampled}{versions}In {disturbed} of {len(samples)} runs other processes took more than "
        f"{MOST_OTHERS:.0%} of the cores. Written by `python -m benchmarks.peers`; what the columns say, and what each "
        f"system was told, is in [benchmarks/README.md](../README.md).\n\n{tables(results)}\n"
    )
    if skips:
        text += "\nNot measured:\n\n" + "".join(f"- {skip}\n" for skip in skips)
    return text


def write(directory: Path, results: Results, skips: Sequence[str], settings: dict[str, Any]) -> None:
    """Write `peers.md`, `peers.json` and `peers.png` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "peers.md").write_text(page(results, skips, settings), encoding="utf-8")
    data = {
        "settings": settings,
        "versions": results.versions,
        "skips": list(skips),
        "failures": results.failures,
        "cells": [
            vars(cell) | {"systems": {name: [_figures(one) for one in each] for name, each in systems.items()}}
            for cell, systems in results.samples.items()
        ],
    }
    (directory / "peers.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    plot(directory / "peers.png", results)


def _figures(sample: Sample | None) -> dict[str, float | None] | None:
    names = ("tokens_per_s", "first_token_p50_s", "gap_p99_s", "acceptance_length", "num_tokens", "others")
    return None if sample is None else {name: getattr(sample, name) for name in names}


def plot(path: Path, results: Results) -> None:
    """Tokens a second by streams and system, on a logarithmic scale: a picture for each pair and kind of drafts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((cell.pair, cell.drafts, cell.prompts) for cell in results.samples))
    figure, all_axes = pyplot.subplots(len(groups), 1, figsize=(9, 3.2 * len(groups)), squeeze=False)
    for group, (axes,) in zip(groups, all_axes, strict=True):
        cells = [cell for cell in results.samples if (cell.pair, cell.drafts, cell.prompts) == group]
        systems = list(dict.fromkeys(name for cell in cells for name in results.samples[cell]))
        width = 0.8 / len(systems)
        for i, system in enumerate(systems):
            heights = [median(results.samples[cell].get(system, []), "tokens_per_s") or 0.0 for cell in cells]
            at = [x + i * width for x in range(len(cells))]
            bars = axes.bar(at, heights, width, label=SYSTEMS[system].title)
            axes.bar_label(bars, fmt="%.0f", fontsize=6)
        middle = width * (len(systems) - 1) / 2
        axes.set_xticks([x + middle for x in range(len(cells))], [f"{cell.streams} streams" for cell in cells])
        axes.set_yscale("log")
        axes.set_ylabel("tokens/s")
        axes.set_title(f"{group[0]}, drafts: {group[1]}, {group[2]} prompts", fontsize=9)
        axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
