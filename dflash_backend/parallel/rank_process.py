"""What `LocalRanks` starts as a process: imports the code of a rank, which loads torch, and runs it."""

from __future__ import annotations

import os
import signal
import sys

from dflash_backend.heap import collector_at_rest


def main() -> int:
    """A rank; the exit status is `rank.main`'s."""
    # A Ctrl-C in a terminal and a service manager's stop reach it as well, and rank 0 decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with collector_at_rest():
        from dflash_backend.parallel import rank
    return rank.main()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
