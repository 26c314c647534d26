"""How many prompt tokens a step may have so that it does not take too long, from what recent steps took.

Two figures are kept, moving averages over recent steps: the seconds of a step that computes next to no prompt tokens,
and how many prompt tokens a second are computed beyond that. A prompt's chunk then follows from the time that a step
may take. Where a figure is wrong, the chunk is, and the next step's time corrects both: the chunk is in balance only
where a step takes as long as it may.
"""

from __future__ import annotations

from dataclasses import dataclass

# `max_step_time_ms` auto: so many seconds, or so many times a step without prompts if that is more.
AUTO_STEP_S = 0.05
AUTO_LIGHT_STEPS = 2.0
# While the requests of only one tenant are there, a step with prompts may take so many times as long: fewer, larger
# steps have more throughput, and there is nobody else to be kept waiting.
ONE_TENANT_FACTOR = 4
# A step with no more prompt tokens than this tells what the others cost; a step is never bounded to fewer.
LIGHT_TOKENS = 8
# Weight of a new figure. One that is far off, such as when other programs take the processor, counts within bounds.
NEW_WEIGHT = 0.25
MAX_JUMP = 4.0


@dataclass(slots=True)
class StepTime:
    """The two figures. `max_step_s` is the bound while several tenants are served; None: auto."""

    max_step_s: float | None = None
    light_s: float = 0.0
    tokens_per_s: float | None = None

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """Take in a step that has run."""
        if seconds <= 0:
            return
        if num_prefill_tokens <= LIGHT_TOKENS:
            self.light_s = _follow(self.light_s or seconds, seconds)
            return
        # The other rows may take longer than usual: a tenth at least was the prompts'.
        rate = num_prefill_tokens / max(seconds - self.light_s, 0.1 * seconds)
        self.tokens_per_s = rate if self.tokens_per_s is None else _follow(self.tokens_per_s, rate)

    def max_prefill_tokens(self, several_tenants: bool) -> int | None:
        """Prompt tokens that a step may have; None while nothing is known."""
        if self.tokens_per_s is None:
            return None
        step_s = self.max_step_s
        if step_s is None:
            step_s = max(AUTO_STEP_S, AUTO_LIGHT_STEPS * self.light_s)
        if not several_tenants:
            step_s *= ONE_TENANT_FACTOR
        return max(LIGHT_TOKENS, int((step_s - self.light_s) * self.tokens_per_s))


def _follow(average: float, new: float) -> float:
    bounded = min(max(new, average / MAX_JUMP), average * MAX_JUMP)
    return average + NEW_WEIGHT * (bounded - average)
