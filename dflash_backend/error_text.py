"""Parts of error messages: another error's first line, and a value from a file or a client."""

from __future__ import annotations

import json
from typing import Any

MAX_SHOWN = 120
MAX_REASON_CHARS = 200

# How a comment of a grammar begins that says what its next line is about: an error of that line tells it.
ABOUT_NEXT_LINE = "# about "


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most `MAX_REASON_CHARS` of it; the error's type when it has none."""
    return str(error).strip().partition("\n")[0].strip()[:MAX_REASON_CHARS] or type(error).__name__


def shown(value: Any) -> str:
    """A value as an error shows it, at most `MAX_SHOWN` characters; the type of one that is not JSON's."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_SHOWN:
        return f"an integer of more than {MAX_SHOWN} digits"
    if isinstance(value, dict | list):
        text = json.dumps(value, default=str)
    else:
        text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
