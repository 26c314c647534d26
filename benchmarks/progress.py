"""How far a benchmark is, on standard error: its results go to standard output."""

from __future__ import annotations

import sys

from dflash_cli.commands.progress import Progress


def progress(unit: str) -> Progress:
    """Says a line every few seconds: `progress("prompts").step(done, total)`."""
    return Progress(unit, lambda text: print(text, file=sys.stderr, flush=True))
