"""Parts of error messages: another error's first line, a value from a file or a client, and what ails a file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

MAX_SHOWN = 120
MAX_REASON_CHARS = 200
LFS_POINTER = b"version https://git-lfs"

# How a comment of a grammar begins that says what its next line is about: an error of that line tells it.
ABOUT_NEXT_LINE = "# about "


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most `MAX_REASON_CHARS` of it; the error's type when it has none."""
    return str(error).strip().partition("\n")[0].strip()[:MAX_REASON_CHARS] or type(error).__name__


def what_ails(path: Path) -> str:
    """Of a file that cannot be read as what it should be: what it is, and what to do about it."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            return "it is a pointer of Git LFS in place of the file, which `git lfs pull` fetches"
    return "it is truncated or damaged, download or copy it again"


def shown(value: Any) -> str:
    """A value as an error shows it, at most `MAX_SHOWN` characters; the type of one that is not JSON's."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_SHOWN:
        return f"an integer of more than {MAX_SHOWN} digits"
    if isinstance(value, dict | list):
        text = json.dumps(value, default=str)
    else:
        text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
