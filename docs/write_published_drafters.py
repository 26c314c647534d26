"""Writes the table of published drafters in docs/checkpoints.md from `dflash_backend.drafters.published`.

Run by `make docs`.
"""

from __future__ import annotations

from pathlib import Path

from dflash_backend.drafters.published import DRAFTERS
from load_tests.markdown import markdown_table

PAGE = Path(__file__).resolve().parent / "checkpoints.md"
BEGIN = "<!-- Written by `make docs` from dflash_backend/drafters/published.py. -->\n"
END = "<!-- End of what is written. -->\n"


def table() -> str:
    """The table, with the sources below it."""
    rows = [
        (f"`{each.target.name}`", f"`{each.name}`", each.kind, each.format, each.unsupported or "yes")
        for each in DRAFTERS
    ]
    sources = ", ".join(dict.fromkeys(each.source for each in DRAFTERS))
    header = ("target", "drafter", "method", "format", "supported")
    return f"\n{markdown_table(header, rows)}\n\nSources: {sources}.\n\n"


def page() -> str:
    """The whole page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
