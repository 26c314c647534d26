"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A table; `align` has a letter for each column: `l` (the default) or `r` for numbers."""
    rules = ["---:" if side == "r" else "---" for side in align.ljust(len(header), "l")]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, rules, *rows))
