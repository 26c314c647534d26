"""Shows an evaluation: a table in Markdown, JSON, and the files of `--out`."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.plot import plot_by_position, require_matplotlib
from dflash_backend.evaluation.run import Evaluation, GroupResult

# Two tables in place of one wide one, so that they fit a terminal of 100 columns: what came out, and the counts behind
# it. The JSON has all figures.
FIGURES = ("set", "prompts", "tokens", "acceptance_length", "acceptance_rate", "accuracy")
COUNTS = ("set", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_length")
POSITIONS_IN_A_ROW = 8
WIDTH = 100


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
        "num_left_out": evaluation.num_left_out,
        **({"failure": evaluation.failure} if evaluation.failure else {}),
        "overall": _group_dict(evaluation.overall),
        "datasets": {group.name: _group_dict(group) for group in evaluation.datasets},
        "categories": {group.name: _group_dict(group) for group in evaluation.categories},
    }


def _group_dict(group: GroupResult) -> dict[str, Any]:
    return {
        "num_prompts": group.num_questions,
        "num_tokens": group.num_tokens,
        **group.counts.as_dict(),
        "mean_acceptance_length": group.mean_acceptance_length,
        "accuracy": group.accuracy,
        "num_correct": group.num_correct,
        "num_scored": group.num_scored,
    }


def tables(evaluation: Evaluation, about: Mapping[str, Any]) -> str:
    """The evaluation as Markdown: figures by group, `per_position_rates` by group, and what was run."""
    shown = groups(evaluation)
    tokens = evaluation.overall.num_tokens
    speed = f" ({tokens / evaluation.seconds:.0f} tokens/s)" if evaluation.seconds else ""
    parts = [markdown_table([FIGURES, *map(_figures_row, shown)]), markdown_table([COUNTS, *map(_counts_row, shown)])]
    num_positions = max(len(group.counts.per_position_rates) for group in shown)
    for start in range(0, num_positions, POSITIONS_IN_A_ROW):
        positions = range(start, min(start + POSITIONS_IN_A_ROW, num_positions))
        header = ("per_position_rates", *(str(position + 1) for position in positions))
        parts.append(markdown_table([header, *(_position_row(group, positions) for group in shown)]))
    if num_positions:
        # How the steps share out over the numbers of accepted drafts, over all sets.
        counts = evaluation.overall.counts
        shares = [f"{n}: {count / counts.num_drafts:.0%}" for n, count in enumerate(counts.accepted_histogram)]
        parts.append(textwrap.fill(f"steps by accepted drafts: {', '.join(shares)}", WIDTH))
    else:
        parts.append("No step had drafts, so there are no rates by position.")
    parts.append(f"{tokens} tokens in {evaluation.seconds:.2f} s{speed}")
    if evaluation.num_left_out:
        asked = len(evaluation.results) + evaluation.num_left_out
        how = f"Failed ({evaluation.failure})" if evaluation.failure else "Interrupted"
        parts.append(textwrap.fill(f"{how}: {len(evaluation.results)} of {asked} questions were answered.", WIDTH))
    parts.append("\n".join(_about_line(name, value) for name, value in about.items()))
    return "\n\n".join(parts) + "\n"


def title(evaluation: Evaluation, about: Mapping[str, Any]) -> str:
    """What was run, for the picture: what was asked, and of which model."""
    overall = evaluation.overall
    temperature = about.get("temperature", 0.0)
    drawn = "greedy" if temperature == 0 else f"temperature {temperature}"
    asked = f"Acceptance by position: {overall.num_questions} prompts of {_as_text(about.get('datasets', []))}, {drawn}"
    model = about.get("engine") or f"model {about.get('model', '?')} at {about.get('server', '?')}"
    return "\n".join([asked, *textwrap.wrap(str(model), WIDTH)[:2]])


def _about_line(name: str, value: Any) -> str:
    # Words are kept whole: the description of an engine has paths in it.
    return textwrap.fill(
        f"- {name}: {_as_text(value)}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _figures_row(group: GroupResult) -> tuple[str, ...]:
    scored = f"{group.num_correct} of {group.num_scored} ({group.accuracy:.0%})" if group.accuracy is not None else "-"
    return (
        group.name,
        str(group.num_questions),
        str(group.num_tokens),
        f"{group.counts.acceptance_length:.3f}",
        _figure(group.counts.acceptance_rate),
        scored,
    )


def _counts_row(group: GroupResult) -> tuple[str, ...]:
    counts = group.counts
    return (
        group.name,
        str(counts.num_drafts),
        str(counts.num_draft_tokens),
        str(counts.num_accepted_tokens),
        _figure(group.mean_acceptance_length),
    )


def _position_row(group: GroupResult, positions: range) -> tuple[str, ...]:
    rates = group.counts.per_position_rates
    return (group.name, *(f"{rates[position]:.3f}" if position < len(rates) else "-" for position in positions))


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
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise EvaluationError(f"{directory} cannot be written to: {error.strerror}; give another --out") from None


def write(directory: Path, evaluation: Evaluation, about: Mapping[str, Any]) -> None:
    """Write `eval.json`, `eval.md` and `eval.png`. Raises `EvaluationError`."""
    text = f"# Acceptance\n\n{tables(evaluation, about)}"
    write_files(directory, as_dict(evaluation, about), text, groups(evaluation), title(evaluation, about))


def write_files(
    directory: Path, data: Mapping[str, Any], text: str, shown: Sequence[GroupResult], heading: str
) -> None:
    """Write `data`, `text` and a picture of what is `shown` as a report's files. Raises `EvaluationError`."""
    try:
        (directory / "eval.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (directory / "eval.md").write_text(f"{text}\n![acceptance by position](eval.png)\n", encoding="utf-8")
        plot_by_position(directory / "eval.png", shown, heading)
    except OSError as error:
        raise EvaluationError(f"the report cannot be written to {directory}: {error.strerror}") from None
