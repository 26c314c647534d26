"""How sub-commands talk: results to standard output, all else as lines to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys

# What a shell says of a program that Ctrl-C ended.
INTERRUPTED = 130


class OutputFailed(Exception):
    """Standard output takes no more; the text says why, and is empty where its reader has gone."""


def escape_unknown_characters() -> None:
    """Have both outputs write what their encoding lacks, such as Japanese in Latin-1, with a backslash: no answer is to
    end of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """One line to standard error."""
    remark(f"dflash-triton: {text}")


def remark(text: str) -> None:
    """Text to standard error that is no message of ours, such as statistics. Does nothing where that takes no more."""
    if sys.stderr is None:  # closed before the start; `print` would take standard output
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int = 1) -> int:
    """Say what went wrong, and return the exit status."""
    say(message)
    return status


def write(text: str) -> None:
    """A piece of a result to standard output, at once. Raises `OutputFailed`, which the command line turns into the end
    of the command."""
    if sys.stdout is None:
        raise OutputFailed("standard output is closed")
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
