"""Lines on standard error that never keep waiting who says them, as `serve` and the OpenAI front end need."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time

STANDARD_ERROR = 2
WAITING_LINES = 1000


class Lines:
    """Writes lines to a descriptor in a thread of its own. When its reader is slow or gone, or the disk is full, lines
    are dropped and counted: a server must not wait for a reader of its log."""

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(WAITING_LINES)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log-lines", daemon=True).start()

    def put(self, line: str) -> None:
        """Write a line when its turn comes, or drop it. Never waits."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1

    def say(self, text: str) -> None:
        """A line of our own."""
        self.put(f"dflash-triton: {text}")

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all that was put is written, but no longer than this."""
        deadline = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            line = self._waiting.get()
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                line += f"\ndflash-triton: {dropped} lines of the log were dropped, since nobody read them in time"
            if not self._written(line):
                self._num_dropped += 1 + dropped
            self._waiting.task_done()

    def _written(self, line: str) -> bool:
        data = (line + "\n").encode(errors="replace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return not data


class LinesHandler(logging.Handler):
    """Writes the records of a log as such lines."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Give a record to the lines. Never waits."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not end who logs it
            text = f"{record.levelname} {record.msg!r} {record.args!r}"
        self._lines.put(text)
