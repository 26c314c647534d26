"""The frontend's lines in Triton's log, by the `log_level` setting. Used by the service and the supervisor.

Triton has levels of its own, which the server's options set and no model can: it shows what is information and hides
what is verbose. So the setting is kept here, and a debug line goes out as information with a mark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

LEVELS = ("debug", "info", "warning", "error")
PREFIX = "dflash: "


class Log:
    """Writes lines of at least `level`. Any thread may. Nothing is raised."""

    def __init__(self, pb_utils: ModuleType, level: str) -> None:
        """`level` is one of `LEVELS`, as the setting has it."""
        self._logger = pb_utils.Logger
        self._level = LEVELS.index(level)

    @property
    def debugging(self) -> bool:
        """Whether debug lines are written: what is costly to say is made only then."""
        return self._level == 0

    def debug(self, text: str) -> None:
        """What only somebody who looks for a fault wants to know. The one level at which a prompt may be shown."""
        if self.debugging:
            self._write(self._logger.log_info, f"debug: {text}")

    def info(self, text: str) -> None:
        """What an operator may want to know."""
        if self._level <= LEVELS.index("info"):
            self._write(self._logger.log_info, text)

    def warning(self, text: str) -> None:
        """What an operator should look at."""
        if self._level <= LEVELS.index("warning"):
            self._write(self._logger.log_warn, text)

    def error(self, text: str) -> None:
        """What has gone wrong."""
        self._write(self._logger.log_error, text)

    @staticmethod
    def _write(line: Callable[[str], None], text: str) -> None:
        """A line that Triton does not take goes to standard error, which is the server's: a full shared memory must not
        end the thread that wanted to say so."""
        try:
            line(PREFIX + text)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises
            print(f"{PREFIX}{text} (not in the log: {error})", file=sys.stderr, flush=True)
