"""How long requests take while another client floods the server, against alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

# Of the medians.
ALLOWED_RATIO = 3.0


@dataclass(frozen=True)
class FloodedTimes:
    """Seconds of requests alone and beside the flood."""

    idle_s: list[float]
    flooded_s: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.flooded_s) / statistics.median(self.idle_s)

    @property
    def allowed_ratio(self) -> float:
        """The most that `ratio` may be."""
        return ALLOWED_RATIO

    def misses(self) -> list[str]:
        """What misses its bound, in words."""
        if self.ratio <= self.allowed_ratio:
            return []
        return [f"requests take {self.ratio:.2f} times as long beside the flood; at most {self.allowed_ratio:g}"]

    def __str__(self) -> str:
        idle, flooded = (sorted(1000 * second for second in times) for times in (self.idle_s, self.flooded_s))
        return (
            f"median of {len(idle)} alone {statistics.median(idle):.0f} ms, of {len(flooded)} beside the flood "
            f"{statistics.median(flooded):.0f} ms (longest {flooded[-1]:.0f} ms): {self.ratio:.2f} times"
        )
