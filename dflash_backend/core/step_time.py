"""How many prompt tokens a step may have so that it does not take too long, from what recent steps took.

Two figures are kept, moving averages over recent steps: how long a step takes for its decode rows, a line over their
tokens, and how many prompt tokens a second are computed beyond that. A prompt's chunk then follows from the time that a
step may take. Where a figure is wrong, the chunk is, and the next step's time corrects both: the chunk is in balance
only where a step takes as long as it may.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# `max_step_time_ms` auto: the larger of this many seconds and this many times a step without prompts.
AUTO_STEP_S = 0.004
AUTO_ONE_TENANT_STEP_S = 0.048  # in its place while only one tenant has requests
AUTO_LIGHT_STEPS = 1.5
# This many more for each tenant beyond the second that has prompts to compute: short steps would leave them little of
# the time, and with many tenants each gets a small part of it in any case.
LIGHT_STEPS_PER_TENANT = 0.5
# While only one tenant has requests, a step with prompts may take this many times as long: fewer, larger steps have
# more throughput, and no other tenant waits.
ONE_TENANT_FACTOR = 8
# A step with no more prompt tokens than this tells what the others cost; a step is never bounded to fewer.
LIGHT_TOKENS = 8
# Weight of a new figure. One that is far off, such as when other programs take the processor, counts within bounds.
NEW_WEIGHT = 0.25
MAX_JUMP = 4.0


@dataclass(slots=True)
class _Line:
    """A straight line through recent points: moving averages of both coordinates, of the variance of one, and of the
    covariance."""

    x: float = 0.0
    y: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def at(self, x: float) -> float:
        """The value at `x`, at least a quarter of the average; 0 before there is a point."""
        slope = max(0.0, self.covariance / self.variance) if self.variance > 1.0 else 0.0
        return max(self.y / 4, self.y + slope * (x - self.x))

    def add(self, x: float, y: float) -> None:
        """Take in a point."""
        if self.y == 0.0:
            self.x, self.y = x, y
            return
        from_x, from_y = x - self.x, min(y, MAX_JUMP * self.at(x)) - self.y
        self.x += NEW_WEIGHT * from_x
        self.y += NEW_WEIGHT * from_y
        self.variance = (1 - NEW_WEIGHT) * (self.variance + NEW_WEIGHT * from_x * from_x)
        self.covariance = (1 - NEW_WEIGHT) * (self.covariance + NEW_WEIGHT * from_x * from_y)


@dataclass(slots=True)
class StepTime:
    """The two figures. `max_step_s` is the bound while several tenants are served; None: auto."""

    max_step_s: float | None = None
    tokens_per_s: float | None = None
    _light: _Line = field(default_factory=_Line)

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Take in a step that has run."""
        if seconds <= 0:
            return
        if num_prefill_tokens <= LIGHT_TOKENS:
            prefill_s = num_prefill_tokens / self.tokens_per_s if self.tokens_per_s else 0.0
            self._light.add(num_decode_tokens, max(seconds - prefill_s, seconds / 2))
            return
        if num_decode_tokens and self.tokens_per_s and not self._light.y:
            # Every step so far had prompts. 0 leaves it unknown.
            self._light.add(num_decode_tokens, max(seconds - num_prefill_tokens / self.tokens_per_s, 0.0))
        # The other rows may take longer than usual: a tenth at least was the prompts'.
        rate = num_prefill_tokens / max(seconds - self._light.at(num_decode_tokens), 0.1 * seconds)
        self.tokens_per_s = rate if self.tokens_per_s is None else _follow(self.tokens_per_s, rate)

    def max_prefill_tokens(self, num_decode_tokens: int, num_prompting: int | None) -> int | None:
        """Prompt tokens that a step may have beside its decode tokens; None while nothing is known.

        num_prompting: while several tenants are served, those of them that have prompts to compute; None: only one is.
        """
        if self.tokens_per_s is None:
            return None
        light_s = self._light.at(num_decode_tokens)
        longest = ONE_TENANT_FACTOR * AUTO_LIGHT_STEPS
        if self.max_step_s is not None:
            step_s = self.max_step_s * (ONE_TENANT_FACTOR if num_prompting is None else 1)
        elif num_prompting is None:
            step_s = max(AUTO_ONE_TENANT_STEP_S, longest * light_s)
        else:
            light_steps = AUTO_LIGHT_STEPS + LIGHT_STEPS_PER_TENANT * max(num_prompting - 2, 0)
            step_s = max(AUTO_STEP_S, min(light_steps, longest) * light_s)
        return max(LIGHT_TOKENS, int((step_s - light_s) * self.tokens_per_s))

    def as_long_as_decoding(self, num_decode_tokens: int) -> int:
        """Prompt tokens that take as long as a step with these decode tokens alone; 0 while nothing is known."""
        return int(self._light.at(num_decode_tokens) * self.tokens_per_s) if self.tokens_per_s is not None else 0


def _follow(average: float, new: float) -> float:
    bounded = min(max(new, average / MAX_JUMP), average * MAX_JUMP)
    return average + NEW_WEIGHT * (bounded - average)
