"""What a drafter runs for a number of drafts: `core.speculation` learns the cost in these terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class DrafterWork:
    """Passes, queries, and the rows that passes run.

    lookahead_base: queries of a row beside one for each draft; None: the drafter runs none. autoregressive: each draft
    of a row takes a pass, which it shares with that draft of all other rows; else a single pass drafts for all of them.
    """

    lookahead_base: int | None = 1
    autoregressive: bool = False

    def num_queries(self, num_drafts: Number, num_rows: Number) -> Number:
        """Queries of all rows, for that many drafts of as many rows together."""
        return 0 * num_drafts if self.lookahead_base is None else num_drafts + self.lookahead_base * num_rows

    def num_row_passes(self, num_drafts: Number, num_rows: Number) -> Number:
        """Rows, each as often as a pass reads its context."""
        return num_drafts if self.autoregressive else num_rows

    def num_passes(self, longest: Number) -> Number:
        """Passes for at least one row that drafts, where the one with the most drafts has `longest`."""
        return longest if self.autoregressive else 0 * longest + 1


ONE_PASS = DrafterWork()
"""That of a drafter which drafts in a single pass, with a query at the anchor."""
