"""The process of one system, as the benchmark sees it. Times in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.figures import Sample

STOP_S = 60.0
LOG_TAIL = 600


class SideError(RuntimeError):
    """A system that did not start, or did not answer, and why."""


class Side:
    """A system's process. `answer_s` is how long one run may take."""

    def __init__(self, command: list[str], environ: Mapping[str, str], log: Path, answer_s: float) -> None:
        self._log, self._answer_s = log, answer_s
        with open(log, "w") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | dict(environ),
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, timeout_s: float) -> str:
        """Wait until its model is loaded; its version. Raises `SideError`."""
        return str(self._answer(timeout_s)["ready"])

    def run(self, prompts: list[list[int]], streams: int, max_tokens: int) -> Sample:
        """Let it answer these prompts. Raises `SideError`."""
        pids = self._tree()
        before, busy, started = _cpu_s(pids), _busy_s(), time.perf_counter()
        own = time.process_time()
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"prompts": prompts, "streams": streams, "max_tokens": max_tokens}),
                file=self._process.stdin,
                flush=True,
            )
        except OSError as error:
            raise SideError(f"it has ended ({error}): {self._said()}") from None
        data = self._answer(self._answer_s)
        seconds, busy = time.perf_counter() - started, _busy_s() - busy
        used = _cpu_s(self._tree()) - before + time.process_time() - own
        return Sample.of(data, max(0.0, busy - used) / (seconds * (os.cpu_count() or 1)))

    def close(self) -> None:
        """End it and all that it has started."""
        pids = self._tree()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise SideError(f"it has said nothing for {timeout_s:.0f} s") from None
        if not line:
            self._lines.put("")
            raise SideError(f"it has ended: {self._said()}")
        data: dict[str, Any] = json.loads(line)
        if "error" in data:
            raise SideError(data["error"])
        return data

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_TAIL:].strip() or "it said nothing"

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    """The processor time of processes, that of their children that have ended too."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal")))
