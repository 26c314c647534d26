"""The plot of acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.run import GroupResult


def require_matplotlib() -> None:
    """Raise `EvaluationError` where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise EvaluationError("--out draws a plot with matplotlib, which is not installed; run pip install matplotlib")


def plot_by_position(path: Path, groups: Sequence[GroupResult], title: str) -> None:
    """One line for each group: the share of drafts whose token at a position (from 1) was accepted. Raises
    `OSError`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for group in groups:
        rates = group.counts.per_position_rates
        label = f"{group.name} (acceptance length {group.counts.acceptance_length:.2f})"
        style = {"color": "black", "linewidth": 2.5} if group.name == "overall" else {"linewidth": 1.5}
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, label=label, **style)
    num_positions = max(len(group.counts.per_position_rates) for group in groups)
    axes.set_xticks(range(1, num_positions + 1))
    axes.set_ylim(0, 1.02)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of drafts accepted up to here")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
