"""Waits for the end of a process that is no child of this one. Linux only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

POLL_S = 0.5


class WatchedProcess:
    """A process that lived when this was made, told from a later one of the same number where the kernel can."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except OSError:
            # Ended already, or a sandbox without the call: then the number is all there is.
            self._fd = None

    def wait(self) -> None:
        """Return when it has ended, also while its parent has not collected its exit status."""
        if self._fd is not None:
            select.select([self._fd], [], [])
            return
        while _lives(self._pid):
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
