"""Writes what `make bench-gpu` measured: tables in Markdown, JSON and plots. Pure: it only reads `Results`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.floor import PHASES
from benchmarks.gpu.prompts import PACKAGES
from benchmarks.gpu.results import DFLASH, EQUAL, NO_DRAFT, RAGGED, Cycle, Results
from benchmarks.gpu.synthetic import MARK
from load_tests.markdown import markdown_table

GAP = "host gap"
COLOURS = {"verify": "#4878a8", "accept": "#8fb7d8", "inject": "#7a9a52", "draft": "#d99a3c", GAP: "#b8432f"}
_CAPTION: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7}
TARGET_SHAPE = "Qwen3-8B"
SHORT, LONG = 1024, 32768


# What is asked of one stream on an H200, and what such a GPU copies in a second, read plus written.
H200_TOKENS_PER_S, H200_BANDWIDTH = 1150, 4.28e12


@dataclass(frozen=True)
class Target:
    """One thing that is promised on a GPU: `measured` against `bound`, an upper one or a lower one. None: not
    measured."""

    name: str
    bound: float
    upper: bool
    measured: float | None

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.measured is None:
            return "not measured"
        met = self.measured <= self.bound if self.upper else self.measured >= self.bound
        return "met" if met else "missed"


def targets(results: Results) -> list[Target]:
    """What the project promises of Qwen3-8B on a GPU of this bandwidth, beside what this run measured."""
    one, many = (results.find(TARGET_SHAPE, DFLASH, batch, SHORT) for batch in (1, 32))

    def of(cycle: Cycle | None, value: Callable[[Cycle], float | None]) -> float | None:
        return None if cycle is None else value(cycle)

    attention = [
        run.bytes_per_s / results.ceilings.copy_bandwidth
        for run in results.attention
        if results.ceilings is not None
        and (run.shape, run.name, run.batch, run.context) == (TARGET_SHAPE, "verify", 1, LONG)
    ]
    return [
        Target("verify over its floor, batch 1", 1.15, True, of(one, lambda c: c.over_floor("verify"))),
        Target("inject over its floor, batch 1", 1.4, True, of(one, lambda c: c.over_floor("inject"))),
        Target("draft over its floor, batch 1", 1.4, True, of(one, lambda c: c.over_floor("draft"))),
        Target("host gap's share of a cycle, batch 1", 0.05, True, of(one, lambda c: c.idle_share)),
        Target("host gap's share of a cycle, batch 32", 0.05, True, of(many, lambda c: c.idle_share)),
        Target("whole cycle over its floor, batch 1", 1.3, True, of(one, lambda c: c.cycle_s / c.floor_s)),
        Target(f"tokens/s of one stream, {MARK}", tokens_bound(results), False, of(one, lambda c: c.tokens_per_s)),
        Target("one row of 32k over equal lengths", 1.2, True, ragged_ratio(results)),
        Target("prompt's attention over FlashAttention's rate", 0.8, False, prompt_ratio(results)),
        Target("attention at 32k over copy bandwidth", 0.7, False, max(attention, default=None)),
    ]


def tokens_bound(results: Results) -> float:
    """Tokens a second of one stream that are asked for: those of an H200, by the GPU's bandwidth."""
    share = 1.0 if results.ceilings is None else results.ceilings.copy_bandwidth / H200_BANDWIDTH
    return round(H200_TOKENS_PER_S * share)


def ragged_ratio(results: Results) -> float | None:
    """Time of a cycle with one row of 32k over that of rows with as many positions in all; None if not measured."""
    found = [[c for c in results.cycles if (c.shape, c.system) == (TARGET_SHAPE, name)] for name in (RAGGED, EQUAL)]
    return found[0][0].cycle_s / found[1][0].cycle_s if all(found) else None


def prompt_ratio(results: Results) -> float | None:
    """Our rate of a prompt's attention over FlashAttention's, at the length where it is least; None if not measured."""
    rates: dict[int, dict[str, float]] = {}
    for run in results.prompts:
        if run.shape == TARGET_SHAPE and not run.behind:
            rates.setdefault(run.tokens, {})[run.system] = run.flops_per_s
    ratios = [
        own["triton"] / max(rate for system, rate in own.items() if system in PACKAGES)
        for own in rates.values()
        if "triton" in own and own.keys() & PACKAGES.keys()
    ]
    return min(ratios, default=None)


def write(directory: Path, results: Results) -> str:
    """Write `gpu.md`, `gpu.json` and, where matplotlib is, plots into `directory`; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (directory / "gpu.md").write_text(text, encoding="utf-8")
    (directory / "gpu.json").write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        for shape in dict.fromkeys(cycle.shape for cycle in results.cycles if cycle.phases):
            plot_cycles(directory / f"cycle-{shape.lower()}.png", results, shape)
    return text


def as_json(results: Results) -> dict[str, Any]:
    """Everything, with what follows from it."""
    cycles = [
        asdict(cycle) | {"gap_s": cycle.gap_s, "floor_s": cycle.floor_s, "acceptance": _acceptance(cycle)}
        for cycle in results.cycles
    ]
    return {
        "settings": results.settings,
        "device": results.device,
        "ceilings": asdict(results.ceilings) if results.ceilings else None,
        "targets": [asdict(target) | {"verdict": target.verdict} for target in targets(results)],
        "cycles": cycles,
        "attention": [asdict(run) for run in results.attention],
        "sampling": [asdict(run) for run in results.sampling],
        "steps": [asdict(run) for run in results.steps],
        "prompts": [asdict(run) for run in results.prompts],
        "starts": [asdict(run) for run in results.starts],
        "kernels": [asdict(entry) for entry in results.kernels],
        "skipped": [asdict(entry) for entry in results.skipped],
    }


def markdown(results: Results) -> str:
    """All tables."""
    parts = [f"# Decode cycles on {results.device.get('name', 'an unknown device')}"]
    note = results.device.get("note")
    if note:
        parts.append(f"**{note}**")
    parts.append(f"Random weights. Acceptance with drafts is drawn: {results.settings.get('acceptance', MARK)}.")
    if results.ceilings is not None:
        copy, rate = results.ceilings.copy_bandwidth / 1e12, results.ceilings.matrix_rate / 1e12
        parts.append(f"Measured ceilings: copy {copy:.3f} TB/s (read plus written), matrix {rate:.0f} TFLOP/s.")
    parts += ["## Promises", target_table(results), "## Cycles", cycle_table(results.cycles)]
    comparison = comparison_table(results)
    if comparison:
        parts += ["## Against other ways to run the same weights", comparison]
    if results.steps:
        parts += ["## Steps with prompts", step_table(results)]
    if results.prompts:
        parts += ["## Attention of one layer for a whole prompt", prompt_table(results)]
    for run in results.starts:
        known = "with kernels that were compiled before" if run.cached else "with every kernel compiled anew"
        parts.append(f"{run.shape}: {run.seconds:.1f} s from loaded weights to the first request, {known}, "
                     f"{run.num_graphs} padded steps.")  # fmt: skip
    if results.attention:
        parts += ["## Attention of one layer alone", attention_table(results)]
    if results.sampling:
        parts += ["## Tokens of sampled rows", sampling_table(results)]
    for shape in dict.fromkeys(entry.shape for entry in results.kernels):
        parts += [f"## Where a cycle's time goes: {shape}", kernel_table(results, shape)]
    if results.skipped:
        parts += ["## Not measured", "\n".join(f"- {entry.what}: {entry.reason}" for entry in results.skipped)]
    return "\n\n".join(parts) + "\n"


def target_table(results: Results) -> str:
    """What is promised of Qwen3-8B at a context of 1k, and what was measured."""
    rows = []
    for target in targets(results):
        sign = "at most" if target.upper else "at least"
        measured = "-" if target.measured is None else f"{target.measured:.3g}"
        rows.append([target.name, f"{sign} {target.bound:g}", measured, target.verdict])
    return markdown_table([f"{TARGET_SHAPE}, context 1k", "promised", "measured", ""], rows)


def cycle_table(cycles: list[Cycle]) -> str:
    """Each cycle whose phases were measured: times, and in brackets how many times the floor."""
    header = ["model", "system", "batch", "context", *(f"{phase}, ms" for phase in PHASES), f"{GAP}, ms", "cycle, ms"]
    header += ["host, ms", "floor, ms", "tokens/s", "acceptance"]
    rows = []
    for cycle in cycles:
        if not cycle.phases or not cycle.floor:
            continue
        row = [cycle.shape, cycle.system, str(cycle.batch), str(cycle.nominal_context)]
        row += [_over_floor(cycle.phases.get(phase), cycle.over_floor(phase)) for phase in PHASES]
        row += [_ms(cycle.gap_s), _over_floor(cycle.cycle_s, cycle.cycle_s / cycle.floor_s)]
        row += [_ms(cycle.host_s), _ms(cycle.floor_s)]
        rows.append([*row, f"{cycle.tokens_per_s:.0f}", _acceptance(cycle)])
    return markdown_table(header, rows) if rows else "No cycle was measured with its phases."


def comparison_table(results: Results) -> str:
    """Tokens per second of every system, at the batches and contexts where more than our own was measured."""
    keys = dict.fromkeys(
        (c.shape, c.batch, c.nominal_context) for c in results.cycles if c.system not in (DFLASH, NO_DRAFT)
    )
    systems = list(dict.fromkeys(c.system for c in results.cycles))
    rows = []
    for shape, batch, context in keys:
        found = [results.find(shape, system, batch, context) for system in systems]
        speeds = ["-" if cycle is None else f"{cycle.tokens_per_s:.0f}" for cycle in found]
        rows.append([shape, str(batch), str(context), *speeds])
    heads = [f"{system}{f' ({MARK})' if DFLASH in system else ''}" for system in systems]
    return markdown_table(["tokens/s: model", "batch", "context", *heads], rows) if rows else ""


def attention_table(results: Results) -> str:
    """Bytes per second of KV, and their share of the copy bandwidth."""
    rows = []
    for run in results.attention:
        share = "-" if results.ceilings is None else f"{run.bytes_per_s / results.ceilings.copy_bandwidth:.0%}"
        row = [run.shape, run.backend, run.name, str(run.batch), str(run.queries), str(run.context)]
        rows.append([*row, f"{run.seconds * 1e6:.1f}", f"{run.bytes_per_s / 1e12:.3f}", share])
    header = ["model", "backend", "as in", "batch", "queries", "context", "time, us", "TB/s", "of copy bandwidth"]
    return markdown_table(header, rows)


def step_table(results: Results) -> str:
    """Prompts alone, and steps of decode rows with a prompt beside them: times, and how many times the floor."""
    rows = []
    for run in results.steps:
        row = [run.shape, run.name, str(run.batch), str(run.tokens)]
        row += [_over_floor(run.seconds, run.seconds / run.floor_s if run.floor_s else None), _ms(run.device_s)]
        rows.append([*row, _ms(run.host_s), _ms(run.floor_s)])
    header = ["model", "step", "rows that decode", "tokens of the prompt", "time, ms", "phases, ms", "host, ms"]
    return markdown_table([*header, "floor, ms"], rows)


def prompt_table(results: Results) -> str:
    """Operations per second by each system, their share of the matrix rate, and how far its numbers are from ours."""
    rows = []
    for run in results.prompts:
        share = "-" if results.ceilings is None else f"{run.flops_per_s / results.ceilings.matrix_rate:.0%}"
        row = [run.shape, run.system, str(run.tokens), str(run.behind), f"{run.seconds * 1e6:.1f}"]
        difference = "-" if run.difference is None else f"{run.difference:.2g}"
        rows.append([*row, f"{run.flops_per_s / 1e12:.1f}", share, difference])
    header = ["model", "system", "tokens", "behind", "time, us", "TFLOP/s", "of matrix rate", "largest difference"]
    return markdown_table(header, rows)


def sampling_table(results: Results) -> str:
    """What serves beside the torch form, which sorts where tokens are filtered."""
    rows = [
        [run.shape, run.filters, str(run.rows), f"{run.seconds * 1e6:.1f}", f"{run.torch_seconds * 1e6:.1f}"]
        for run in results.sampling
    ]
    return markdown_table(["model", "filters", "rows", "time, us", "torch, us"], rows)


def kernel_table(results: Results, shape: str) -> str:
    """The kernels that take the most time of a cycle."""
    kernels = [entry for entry in results.kernels if entry.shape == shape]
    first = kernels[0]
    header = [f"batch {first.batch}, context {first.context}, k = {first.k}: kernel", "calls a cycle", "us a cycle"]
    return markdown_table(header, [[f"`{e.kernel}`", f"{e.calls:.1f}", f"{e.seconds * 1e6:.1f}"] for e in kernels])


def plot_cycles(path: Path, results: Results, shape: str) -> None:
    """For each batch and context with DFlash: the cycle by phase, and beside it the floor by phase.

    Cycles differ a hundredfold, so each is drawn in units of its own floor, with the times written above.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cycles = [c for c in results.cycles if c.shape == shape and c.system == DFLASH and c.phases]
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.3 * len(cycles) + 2), 4.8))
    for place, cycle in enumerate(cycles):
        measured = {**cycle.phases, GAP: cycle.gap_s or 0.0}
        for offset, parts, alpha in ((0.2, cycle.floor, 0.45), (-0.2, measured, 1.0)):
            bottom = 0.0
            for phase, seconds in parts.items():
                label = phase if place == 0 and offset < 0 else None
                height = seconds / cycle.floor_s
                axes.bar(place + offset, height, 0.36, bottom=bottom, color=COLOURS[phase], alpha=alpha, label=label)
                bottom += height
        axes.text(place, bottom, f"{cycle.cycle_s * 1e3:.2f} ms\nfloor {cycle.floor_s * 1e3:.2f}", **_CAPTION)
    labels = [f"batch {c.batch}\ncontext {c.nominal_context}" for c in cycles]
    axes.set_xticks(range(len(cycles)), labels, fontsize=8)
    axes.set_ylabel("cycle over its floor (left: measured; right, pale: floor)")
    note = results.device.get("note")
    axes.set_title(f"{shape}, {results.device.get('name', '')}, {MARK}" + (f"\n{note}" if note else ""), fontsize=9)
    axes.margins(y=0.15)  # space for the captions
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _acceptance(cycle: Cycle) -> str:
    if not cycle.synthetic:
        return "none"
    return f"{cycle.tokens_per_s * cycle.cycle_s / cycle.batch:.2f} ({MARK})"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _over_floor(seconds: float | None, ratio: float | None) -> str:
    return _ms(seconds) + (f" ({ratio:.2f}x)" if ratio is not None else "")
