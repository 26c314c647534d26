"""Ends a server whose launcher is gone, however that ended, and removes what it left.

A process of its own, which waits for the end of a pipe that the launcher alone holds open. A launcher that stops its
server ends its guardian too, so the pipe's end means that the launcher was killed. Then the server is told to end and
has its exit timeout for requests in flight; whatever still lives after that is killed, and folder and shared memory are
removed. The processes are found by a mark in their environment, since a parent may have ended before its children.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In the server's folder: the environments that Triton has made for it, a path a line.
ENV_FOLDERS_FILE = "env-folders"
TERMINATE_S = 0.5
KILL_S = 5.0


class Guardian:
    """The guardian of one server. `start` before the server is started, `end` once nothing of it is left."""

    def __init__(self, mark: str, patience_s: float, folder: Path, segments: str) -> None:
        """`mark` is text in the environment of each of the server's processes, `patience_s` what they have to end by
        themselves. Removed afterwards are the files that fit the pattern `segments`, the empty folders that
        `ENV_FOLDERS_FILE` in `folder` names by then, and `folder`."""
        self._order = json.dumps({"mark": mark, "patience_s": patience_s, "folder": str(folder), "segments": segments})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process number, while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, or start it again if it has ended."""
        if self.pid is not None:
            return
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._order],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # A signal to the launcher's process group must not reach it.
            start_new_session=True,
        )

    def end(self) -> None:
        """End it, without anything that it is there for."""
        process, self._process = self._process, None
        if process is not None:
            # Before its pipe ends.
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def clean_up(order: dict[str, Any], processes: dict[str, Any]) -> None:
    """End every process that carries the mark, then remove what the server has left. `processes` is the module of that
    name: the functions that find and end processes."""
    marked: Callable[[str], set[Any]] = processes["marked"]
    first = min(marked(order["mark"]), key=lambda process: process.start_time, default=None)
    if first is not None:
        # tritonserver, which lets requests in flight finish. The others follow it.
        processes["send"]({first}, signal.SIGTERM)
    deadline = time.monotonic() + order["patience_s"]
    while (left := marked(order["mark"])) and time.monotonic() < deadline:
        time.sleep(0.1)
    while left and time.monotonic() < deadline + KILL_S:
        processes["end"](left, TERMINATE_S, KILL_S)
        left = marked(order["mark"])
    for segment in glob.glob(order["segments"]):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(segment)
    with contextlib.suppress(OSError):  # the server may have ended before they were noted
        for path in Path(order["folder"], ENV_FOLDERS_FILE).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(OSError):
                os.rmdir(path)
    shutil.rmtree(order["folder"], ignore_errors=True)


def main() -> None:
    """Entry point: wait for the end of standard input, then clean up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    while os.read(0, 4096):
        pass
    # By its path: the package would bring the whole client along, some 50 MB for a process that only waits.
    clean_up(order, runpy.run_path(str(Path(__file__).with_name("processes.py"))))


if __name__ == "__main__":
    main()
