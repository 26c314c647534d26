"""Shows an evaluation: a table in Markdown, JSON, and the files of `--out`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.plot import plot_by_position, require_matplotlib
from dflash_backend.evaluation.run import Evaluation, GroupResult

COLUMNS = (
    "set",
    "prompts",
    "tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_length",
    "draft_tokens_per_step",
    "acceptance_rate",
    "accuracy",
)


def groups(evaluation: Evaluation) -> list[GroupResult]:
    """What a table has a row for: everything, then each data set and category that is not everything anew."""
    rows = [evaluation.overall]
    datasets = evaluation.datasets
    rows += datasets if len(datasets) > 1 else []
    names = {group.name for group in datasets}
    return rows + [group for group in evaluation.categories if group.name not in names]


def as_dict(evaluation: Evaluation, about: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation as JSON data. `about` says what was run."""
    return {
        "about": dict(about),
        "seconds": evaluation.seconds,
        "overall": _group_dict(evaluation.overall),
        "datasets": {group.name: _group_dict(group) for group in evaluation.datasets},
        "categories": {group.name: _group_dict(group) for group in evaluation.categories},
    }


def _group_dict(group: GroupResult) -> dict[str, Any]:
    return {
        "num_prompts": group.num_questions,
        "num_tokens": group.num_tokens,
        **group.counts.as_dict(),
        "accuracy": group.accuracy,
        "num_correct": group.num_correct,
        "num_judged": group.num_judged,
    }


def tables(evaluation: Evaluation, about: Mapping[str, Any]) -> str:
    """The evaluation as Markdown: figures by group, `per_position_rates` by group, and what was run."""
    shown = groups(evaluation)
    tokens = evaluation.overall.num_tokens
    speed = f" ({tokens / evaluation.seconds:.0f} tokens/s)" if evaluation.seconds else ""
    parts = [markdown_table([COLUMNS, *map(_row, shown)])]
    num_positions = max(len(group.counts.per_position_rates) for group in shown)
    if num_positions:
        header = ("per_position_rates", *(str(position) for position in range(1, num_positions + 1)))
        parts.append(markdown_table([header, *(_position_row(group, num_positions) for group in shown)]))
    else:
        parts.append("No step had drafts, so there are no rates by position.")
    parts.append(f"{tokens} tokens in {evaluation.seconds:.2f} s{speed}")
    parts.append("\n".join(f"- {name}: {_as_text(value)}" for name, value in about.items()))
    return "\n\n".join(parts) + "\n"


def _row(group: GroupResult) -> tuple[str, ...]:
    counts = group.counts
    judged = f"{group.num_correct} of {group.num_judged} ({group.accuracy:.1%})" if group.accuracy is not None else "-"
    return (
        group.name,
        str(group.num_questions),
        str(group.num_tokens),
        str(counts.num_drafts),
        str(counts.num_draft_tokens),
        str(counts.num_accepted_tokens),
        f"{counts.acceptance_length:.3f}",
        _figure(counts.draft_tokens_per_step),
        _figure(counts.acceptance_rate),
        judged,
    )


def _position_row(group: GroupResult, num_positions: int) -> tuple[str, ...]:
    rates = [f"{rate:.3f}" for rate in group.counts.per_position_rates]
    return (group.name, *rates, *["-"] * (num_positions - len(rates)))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)


def markdown_table(rows: Sequence[Iterable[str]]) -> str:
    """A Markdown table with aligned columns; the first row is the header. A `|` in a cell is escaped."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        # Words to the left, figures to the right.
        first, *rest = zip(row, widths, strict=True)
        return f"| {first[0].ljust(first[1])} | " + " | ".join(cell.rjust(width) for cell, width in rest) + " |"

    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def prepare(directory: Path) -> None:
    """Check that a report can be written to `directory`, before an evaluation that may take hours. Makes the
    directory. Raises `EvaluationError`."""
    require_matplotlib()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"{directory} cannot be made: {error.strerror}; give another --out") from None


def write(directory: Path, evaluation: Evaluation, about: Mapping[str, Any]) -> None:
    """Write `eval.json`, `eval.md` and `eval.png`. Raises `EvaluationError`."""
    data = json.dumps(as_dict(evaluation, about), indent=1, ensure_ascii=False) + "\n"
    text = f"# Acceptance\n\n{tables(evaluation, about)}\n![acceptance by position](eval.png)\n"
    try:
        (directory / "eval.json").write_text(data, encoding="utf-8")
        (directory / "eval.md").write_text(text, encoding="utf-8")
        plot_by_position(directory / "eval.png", groups(evaluation))
    except OSError as error:
        raise EvaluationError(f"the report cannot be written to {directory}: {error.strerror}") from None
