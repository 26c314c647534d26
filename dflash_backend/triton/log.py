"""Writes to Triton's log, by the `log_level` setting.

Triton's own levels are set by the server's options, not by a model: information is shown and verbose lines are hidden.
So the level is applied here, and a debug line is marked and written as information.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

LEVELS = ("debug", "info", "warning", "error")
PREFIX = "dflash: "


class Log:
    """Writes lines of at least `level`. Any thread may. Nothing is raised."""

    def __init__(self, pb_utils: ModuleType, level: str, as_vllm: bool = False) -> None:
        """`level` is one of `LEVELS`, as the setting has it. `as_vllm`: the model stands in for one of Triton's vLLM
        backend."""
        self._logger = pb_utils.Logger
        self._as_vllm = as_vllm
        self._level = LEVELS.index(level)

    @property
    def debugging(self) -> bool:
        """Whether debug lines are written, so that costly ones are made only then."""
        return self._level == 0

    def debug(self, text: str) -> None:
        """For finding faults. Only this level may show a prompt."""
        if self.debugging:
            self._write(self._logger.log_info, f"debug: {text}")

    def info(self, text: str) -> None:
        """Something that an operator may want to know."""
        if self._level <= LEVELS.index("info"):
            self._write(self._logger.log_info, text)

    def vllm(self, text: str) -> None:
        """A line of Triton's vLLM backend, for what looks for it in the log; only where the model stands in for one."""
        if self._as_vllm:
            self.info(f"[vllm] {text}")

    def warning(self, text: str) -> None:
        """Something that an operator should look at."""
        if self._level <= LEVELS.index("warning"):
            self._write(self._logger.log_warn, text)

    def error(self, text: str) -> None:
        """A failure."""
        self._write(self._logger.log_error, text)

    @staticmethod
    def _write(line: Callable[[str], None], text: str) -> None:
        """A line that Triton does not take goes to standard error: a full shared memory must not end the thread that
        reports it."""
        try:
            line(PREFIX + text)
        except Exception as error:  # noqa: BLE001 - whatever Triton raises
            print(f"{PREFIX}{text} (not in the log: {error})", file=sys.stderr, flush=True)
