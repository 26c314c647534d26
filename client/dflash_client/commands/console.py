"""How sub-commands talk: results to standard output, all else as lines to standard error."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """One line to standard error."""
    print(f"dflash-triton: {text}", file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> int:
    """Say what went wrong, and return the exit status."""
    say(message)
    return status


def show(text: str) -> int:
    """Print a result and return the exit status: 1 when whoever read our output is gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Nobody is left to tell, and flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
