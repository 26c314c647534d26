"""The log of a `tritonserver`: kept, passed on, and searched for what an operator wants to know.

Triton writes `I1121 09:04:07.287605 4186 model_lifecycle.cc:839] "text"`, escapes quotes and newlines in the text, and
writes a model's own standard error as it is, and with it what the engine's process logs.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Literal

KEPT_LINES = 2000

_TRITON_LINE = re.compile(r"^([IWEFV])\d{4} [\d:.]+ \d+ \S+\] ?\"?(.*?)\"?$")
_ENGINE_LINE = re.compile(r"^dflash: engine: (WARNING|ERROR|CRITICAL): (?:dflash_\w+\.)[\w.]*: (.*)$")
_ESCAPED = re.compile(r"\\(.)")
_MEANT = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
_PROGRESS = re.compile(r"dflash: (loading\b.*)")
_LOAD_FAILURE = re.compile(r"failed to load '[^']*' version \d+: (.*)", re.DOTALL)
_STATUS_WORDS = re.compile(r"^(?:Internal|Invalid argument|Unavailable|Unsupported|Unknown|Not found): ")
_EXCEPTION_NAME = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Failed): ")
# What ends a server when no model says why: a library that is missing, an address that cannot be had.
# A frame of the backtrace that Triton prints when it crashes.
_FRAME = re.compile(r"^\s*#?\d+[#:]? ")
# What a server says less than so long before its end is about its end.
LAST_WORDS_S = 5.0
LAST_LINES = 8
_FATAL = re.compile(r"error while loading shared libraries|^error: |failed to start|Failed to (?:bind|start)")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `level` is Triton's letter (I, W, E, F, V), also of a warning or an error of the engine's, or empty for
    a model's other output."""

    level: Literal["I", "W", "E", "F", "V", ""]
    text: str
    raw: str

    @property
    def progress(self) -> str | None:
        """What the model says about its loading, if that is what the line is."""
        match = _PROGRESS.search(self.text)
        return match.group(1) if match else None


def parse_line(raw: str) -> LogLine:
    """Take a line of the log apart."""
    raw = raw.rstrip("\r\n")
    match = _TRITON_LINE.match(raw)
    if match is None:
        own = _ENGINE_LINE.match(raw)
        if own is None:
            return LogLine("", raw, raw)
        return LogLine("W" if own.group(1) == "WARNING" else "E", f"dflash: engine: {own.group(2)}", raw)
    level: Literal["I", "W", "E", "F", "V", ""] = match.group(1)  # type: ignore[assignment]
    return LogLine(level, _ESCAPED.sub(lambda found: _MEANT.get(found[1], found[0]), match.group(2)), raw)


class ServerLog:
    """Reads a server's output in a thread until it ends, and keeps its last lines."""

    def __init__(self, stream: IO[str], on_line: Callable[[LogLine], None] | None = None) -> None:
        self._lines: deque[tuple[float, LogLine]] = deque(maxlen=KEPT_LINES)
        self._ready_at = 0.0
        self._on_line = on_line
        self._stream = stream
        self._thread = threading.Thread(target=self._read, name="tritonserver-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            for raw in self._stream:
                line = parse_line(raw)
                self._lines.append((time.monotonic(), line))
                if self._on_line is not None:
                    # The log is read on, whatever becomes of what it is shown on: an unread one stops the server.
                    with contextlib.suppress(OSError):
                        self._on_line(line)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the output."""
        self._thread.join(timeout_s)

    def lines(self) -> list[LogLine]:
        """The lines kept so far, oldest first."""
        return [line for _, line in list(self._lines)]

    def mark_ready(self) -> None:
        """The server is ready: what was said before has nothing to do with its end."""
        self._ready_at = time.monotonic()

    def last_words(self) -> str:
        """What a server that was ready said at its end: the lines of its last seconds, without backtraces."""
        entries = list(self._lines)
        since = max(self._ready_at, entries[-1][0] - LAST_WORDS_S) if entries else 0.0
        said = [line for when, line in entries if when > since and line.text.strip() and not _FRAME.match(line.raw)]
        told = [line for line in said if line.level in ("W", "E", "F", "") and line.raw[0] not in "+|"]
        return "\n".join(line.text for line in told[-LAST_LINES:])

    def tail(self, count: int) -> str:
        """The last lines as they were written, without Triton's tables."""
        plain = [line.raw for line in self.lines() if line.raw.strip() and line.raw[0] not in "+|"]
        return "\n".join(plain[-count:])

    def failure(self) -> str:
        """Why the server ended, in as few lines as say it: what the model said, else what Triton said, else the end
        of the log."""
        lines = self.lines()
        for line in lines:
            if line.level == "E" and (match := _LOAD_FAILURE.match(line.text)):
                return _sentence(match.group(1))
        fatal = [line.text for line in lines if _FATAL.search(line.text)]
        return "\n".join(fatal) if fatal else self.tail(15)


def _sentence(text: str) -> str:
    """An exception's message without Triton's status, the exception's name, and the place in the code."""
    text = text.partition("\n\nAt:")[0].strip()
    text = _STATUS_WORDS.sub("", text)
    return _EXCEPTION_NAME.sub("", text).strip()
