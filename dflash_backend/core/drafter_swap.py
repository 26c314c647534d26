"""A drafter that takes the place of another one while requests run.

The drafts change no text, so nothing waits for it. Requests that run go on over the context KV of the drafter before,
to which the new one adds its own: their drafts may fare worse, so they are not counted, and their blocks are not
published. Requests that start after it find no block of the drafter before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_backend.messages import DrafterSwapped, SwapDrafter, SwapOutcome
from dflash_backend.spec_stats import Acceptance

# Blocks that acceptance is taken from, at least; after as many, drafts that no longer pay are not waited for.
MIN_BLOCKS = 100
# Standard errors by which accepted drafts must be too few.
SURE = 2.0


class SwapEndsEngine(Exception):
    """A swap failed in a way after which no step can run: the engine must start anew."""


def compared(now: Acceptance, before: Acceptance) -> tuple[int, float, float]:
    """Accepted drafts, how many would be with the drafter before, and the standard error of the first: at the same
    positions, behind accepted drafts, as far into the answers, where both were seen."""
    known, accepted, expected, variance = before.by_position(), 0, 0.0, 0.0
    for place, (tried, taken) in now.by_position().items():
        if place in known:
            accepted += taken
            expected += tried * known[place][1] / known[place][0]
            variance += taken * (tried - taken) / tried
    return accepted, expected, math.sqrt(variance)


@dataclass
class DrafterSwap:
    """A drafter that is ready, and how it fares.

    exchange: puts it in the place of the worker's, and at its next call back again; to be called with no step in
    flight, by the thread that steps; returns what drafts then, in words. Raises `SwapEndsEngine`; another error changes
    nothing. None once it is settled which of them stays. before: the acceptance of
    the drafter that it took the place of; now: its own, without requests that began before it.
    """

    wanted: SwapDrafter
    exchange: Callable[[], str] | None
    before: Acceptance = field(default_factory=Acceptance)
    now: Acceptance = field(default_factory=Acceptance)

    def says(self, outcome: SwapOutcome, message: str, drafting: str = "") -> DrafterSwapped:
        """What the stub is told. drafting: what `exchange` returned."""
        return DrafterSwapped(self.wanted.swap_id, outcome, message, drafting=drafting)

    def is_due(self, drafting_pays: bool) -> bool:
        """Whether its acceptance is to be compared now. drafting_pays: by the policy of `adaptive_speculation`."""
        if self.exchange is None or not self.wanted.window:
            return False
        num_blocks = self.now.total
        return num_blocks >= self.wanted.window or (
            not drafting_pays and num_blocks >= min(MIN_BLOCKS, self.wanted.window)
        )

    def loses(self) -> bool:
        """Whether too much of the acceptance is lost, surely; False where too little is known of the drafter before."""
        if self.before.total < MIN_BLOCKS:
            return False
        accepted, expected, error = compared(self.now, self.before)
        return accepted + SURE * error < (1 - self.wanted.max_loss) * expected

    def comparison(self) -> str:
        """The two in words."""
        accepted, expected, _ = compared(self.now, self.before)
        if self.before.total < MIN_BLOCKS or not expected:
            return "there were too few blocks of the drafter before to compare it with"
        return (
            f"{accepted} drafts of {self.now.total} blocks were accepted; of the drafter before it would be "
            f"{expected:.0f}"
        )
