"""What `dflash-triton serve` says while its server runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_cli.commands.log_lines import Lines
    from dflash_cli.launcher.server_log import LogLine

# Said by Triton on every machine without a GPU, and on every stream that ends in an error.
NOISE = ("pinned_memory_manager", "CudaDriverHelper", "DCGM", "NVML", "HandleCancellation called")
OURS = "dflash: "
# The end of what is said of an engine that died, as an error.
STARTED_AGAIN = "; the engine is started again "
ACTIVITY = "dflash: activity: "

# What a checkpoint says, and how far its weights are read.
_OF_CHECKPOINT = re.compile(r"loading \d+%: (?:target|drafter): ")


class ServeLog:
    """Shows the server's log: all of it with `verbose`, else its warnings, its lines of activity and, once it is up,
    its errors. Before that an error ends the start, and is said once, with the failure."""

    def __init__(self, lines: Lines, verbose: bool) -> None:
        self._lines = lines
        self._verbose = verbose
        self._warnings: list[str] = []
        self.loading = True
        # Whether it is known what is loaded, and read in a moment.
        self.loads_demo_pair = False
        # The operator has asked for the end: that the model's processes end one after the other is no trouble.
        self.stopping = False

    def __call__(self, line: LogLine) -> None:
        """Take a line of the server's log. Any thread."""
        if self.loading and line.level == "W" and line.text.startswith(OURS):
            self._warnings.append(_first_line(line).removeprefix(OURS))
        if self._verbose:
            self._lines.put(line.raw)
        elif self.stopping and line.text.startswith(OURS) and (line.level == "W" or STARTED_AGAIN in line.text):
            return
        elif line.text.startswith(ACTIVITY) or (
            line.level in (("W",) if self.loading else ("W", "E", "F")) and not any(word in line.raw for word in NOISE)
        ):
            self._lines.say(_first_line(line).removeprefix(OURS))

    def progress(self, text: str) -> None:
        """A line on how the load goes. The verbose log has it already, but for those that say how long it has taken."""
        is_late = text.endswith("so far)")
        if is_late or not (self._verbose or (self.loads_demo_pair and _OF_CHECKPOINT.match(text))):
            self._lines.say(text)

    def ready(self) -> list[str]:
        """The server is up: what the model warned of while it loaded, each once."""
        self.loading = False
        return list(dict.fromkeys(self._warnings))


def _first_line(line: LogLine) -> str:
    return line.text.partition("\n")[0]
