"""What `dflash-triton serve` says while its server runs: on standard error, and never waiting for who reads that."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_cli.launcher.server_log import LogLine

STANDARD_ERROR = 2
WAITING_LINES = 1000
# Said by Triton on every machine without a GPU, and on every stream that ends in an error.
NOISE = ("pinned_memory_manager", "CudaDriverHelper", "DCGM", "NVML", "HandleCancellation called")
OURS = "dflash: "
ACTIVITY = "dflash: activity: "


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


class ServeLog:
    """Shows the server's log: all of it with `verbose`, else its warnings, its lines of activity and, once it is up,
    its errors. Before that an error ends the start, and is said once, with the failure."""

    def __init__(self, lines: Lines, verbose: bool) -> None:
        self._lines = lines
        self._verbose = verbose
        self._warnings: list[str] = []
        self.loading = True

    def __call__(self, line: LogLine) -> None:
        """Take a line of the server's log. Any thread."""
        if self.loading and line.level == "W" and line.text.startswith(OURS):
            self._warnings.append(_first_line(line).removeprefix(OURS))
        if self._verbose:
            self._lines.put(line.raw)
        elif line.text.startswith(ACTIVITY) or (
            line.level in (("W",) if self.loading else ("W", "E", "F")) and not any(word in line.raw for word in NOISE)
        ):
            self._lines.say(_first_line(line).removeprefix(OURS))

    def progress(self, text: str) -> None:
        """A line on how the load goes. The verbose log has it already, but for those that say how long it has taken."""
        if not self._verbose or text.endswith("so far)"):
            self._lines.say(text)

    def ready(self) -> list[str]:
        """The server is up: what the model warned of while it loaded, each once."""
        self.loading = False
        return list(dict.fromkeys(self._warnings))


def _first_line(line: LogLine) -> str:
    return line.text.partition("\n")[0]
