"""How sub-commands talk: results to standard output, all else as lines to standard error."""

from __future__ import annotations

import contextlib
import os
import sys

# What a shell says of a program that Ctrl-C ended.
INTERRUPTED = 130


class OutputFailed(Exception):
    """Standard output takes no more; the text says why, and is empty where its reader has gone."""


def say(text: str) -> None:
    """One line to standard error."""
    remark(f"dflash-triton: {text}")


def remark(text: str) -> None:
    """Text to standard error that is no message of ours, such as statistics. Does nothing where that takes no more."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> int:
    """Say what went wrong, and return the exit status."""
    say(message)
    return status


def write(text: str) -> None:
    """A piece of a result to standard output, at once. Raises `OutputFailed`, which the command line turns into the end
    of the command."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered goes nowhere, or flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        gone = isinstance(error, BrokenPipeError)
        raise OutputFailed("" if gone else f"standard output cannot be written: {error.strerror}") from None


def show(text: str) -> int:
    """Print a result and return the exit status of success. Raises as `write` does."""
    write(f"{text}\n")
    return 0
