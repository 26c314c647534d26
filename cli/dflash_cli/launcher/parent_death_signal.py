"""Runs a command that is told to end when the process that started it has ended, however that ended.

`python parent_death_signal.py CALLER COMMAND ...` becomes COMMAND, with SIGTERM to come when the process CALLER ends.
The launcher puts this before `tritonserver`: a `serve` that is killed can stop nothing any more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def with_death_signal(command: Sequence[str]) -> list[str]:
    """`command`, with SIGTERM to come when the calling process ends. Start it from a thread that lives as long as that
    process: Linux sends the signal when the thread ends."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main() -> None:
    """Entry point."""
    caller, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != caller:
        sys.exit(f"{command[0]} was not started: the process that asked for it has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
