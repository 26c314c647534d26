"""How long a step takes, and how many prompt tokens it may have so that it does not take too long: by what recent steps
took.

A step's time is taken as a line over what it consists of: something fixed, its decode tokens, the positions that its
rows attend to, and its prompt tokens. From the time that a step may take, and what it takes without prompts, follows
how many prompt tokens it may have. Where the line is wrong, their number is, and the next step's time corrects both.

Where every step has as many prompt tokens as it may, the line could give them the decode rows' time: it would be as
right, and leave them fewer tokens. So steps may have some more and some fewer in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of `LinearFit`, by default: part of the weight of what was observed that stays after another observation; a hundred
# of them count.
FIT_FORGETTING = 0.99
# Relative noise of a measured time, and how much longer than expected one counts as: another program had the processor.
NOISE = 0.15
MAX_RATIO = 2.0
# Rounds of coordinate descent after an observation. It begins where the one before ended.
ROUNDS = 3

# `max_step_time_ms` auto: the larger of this many seconds and this many times a step without prompts.
AUTO_STEP_S = 0.004
AUTO_LONG_STEP_S = 0.048  # in its place while only one tenant has requests
AUTO_LIGHT_STEPS = 1.5
# This many more for each tenant beyond the second that has prompts to compute: short steps would leave them little of
# the time, and with many tenants each gets a small part of it in any case. And for each waiting request, beyond the
# first, of the tenant with the fewest: where all have requests that wait, none gains by short steps, which would keep
# rows empty.
LIGHT_STEPS_PER_TENANT = 0.5
LIGHT_STEPS_PER_WAITING = 0.5
# While only one tenant has requests, a step with prompts may take this many times as long: fewer, larger steps have
# more throughput, and no other tenant waits.
ONE_TENANT_FACTOR = 8
# Prompt tokens that a step may always have.
MIN_TOKENS = 8
# After a few steps without prompts in a row, one in four is observed: they add little.
FEW, EVERY = 8, 4
# Part of a step's weight that stays after another one: some thirty count.
FORGETTING = 0.97
# Steps may have this part more and this part fewer than the tokens that take the time in turn, so that it shows what
# they take.
DITHER = 0.25
# Before steps have shown it: this part of a step's time does not depend on its tokens.
FIXED_SHARE = 0.5
# A prompt token is taken to last no less, and a step to have no more.
TINY_S, MOST_TOKENS = 1e-9, 1 << 30
_KILO = 1e-3


class LinearFit:
    """`value = sum(coefficient * feature)`, with errors relative to the value.

    What observations do not tell is taken from the coefficients that it began with.
    """

    def __init__(
        self, coefficients: Sequence[float], deviations: Sequence[float], forgetting: float = FIT_FORGETTING
    ) -> None:
        """The coefficients to begin with, and how far off each may be (standard deviations above 0). forgetting: part
        of an observation's weight that stays after another one."""
        self._forgetting = forgetting
        self.coefficients = list(coefficients)
        self._prior = list(coefficients)
        self._prior_weights = [(NOISE / deviation) ** 2 for deviation in deviations]
        size = len(self.coefficients)
        self._products = [[0.0] * size for _ in range(size)]
        self._values = [0.0] * size

    def at(self, features: Sequence[float]) -> float:
        """The predicted value."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take in a measured value, above 0."""
        coefficients = self.coefficients
        expected = sum(c * x for c, x in zip(coefficients, features, strict=True))
        value = min(value, MAX_RATIO * expected) if expected > 0 else value
        weight = 1 / max(expected, value / MAX_RATIO) ** 2
        for i, x in enumerate(features):
            row, weighted = self._products[i], weight * x
            for j, y in enumerate(features):
                row[j] = self._forgetting * row[j] + weighted * y
            self._values[i] = self._forgetting * self._values[i] + weighted * value
        # Bring the coefficients closer to the best ones, one after the other.
        for _ in range(ROUNDS):
            for i, row in enumerate(self._products):
                prior = self._prior_weights[i]
                others = sum(a * c for a, c in zip(row, coefficients, strict=True)) - row[i] * coefficients[i]
                solution = (self._values[i] + prior * self._prior[i] - others) / (row[i] + prior)
                coefficients[i] = max(0.0, solution)

    def uncertainty(self, features: Sequence[float]) -> float:
        """Standard deviation of the predicted value, relative to it."""
        size = len(features)
        rows = [[*row, x] for row, x in zip(self._products, features, strict=True)]
        for i, weight in enumerate(self._prior_weights):
            rows[i][i] += weight
        for i in range(size):  # elimination without pivots: the matrix is positive definite
            for j in range(size):
                if j != i:
                    factor = rows[j][i] / rows[i][i]
                    rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
        variance = sum(x * row[size] / row[i] for i, (x, row) in enumerate(zip(features, rows, strict=True)))
        return NOISE * math.sqrt(max(variance, 0.0)) / max(self.at(features), 1e-12)


@dataclass(slots=True)
class StepTime:
    """The estimate. `max_step_s` is the bound while several tenants are served; None: auto."""

    max_step_s: float | None = None
    _fit: LinearFit | None = None  # None before a step had prompts
    _num_plain: int = 0  # the last steps, which had no prompts
    _dither: float = DITHER

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float, num_positions: int = 0) -> None:
        """Take in a step that has run. num_positions: that its rows attend to."""
        if seconds <= 0:
            return
        self._dither = -self._dither
        self._num_plain = 0 if num_prefill_tokens else self._num_plain + 1
        if self._num_plain > FEW and self._num_plain % EVERY:
            return
        if self._fit is None:
            if not num_prefill_tokens:
                return
            each = (1 - FIXED_SHARE) * seconds / (num_prefill_tokens + num_decode_tokens)
            fixed = FIXED_SHARE * seconds
            self._fit = LinearFit([fixed, each, 0.0, each], [fixed, each, fixed, each], FORGETTING)
        self._fit.observe([1.0, num_decode_tokens, _KILO * num_positions, num_prefill_tokens], seconds)

    def max_prefill_tokens(
        self, num_decode_tokens: int, num_prompting: int | None, least_waiting: int = 0, num_positions: int = 0
    ) -> int | None:
        """Prompt tokens that a step may have beside its decode tokens; None while nothing is known.

        num_prompting: while several tenants are served, those of them that have prompts to compute; None: only one is.
        least_waiting: requests that wait of the tenant with the fewest. num_positions: that the rows attend to.
        """
        if self._fit is None:
            return None
        light_s = self._light_s(num_decode_tokens, num_positions)
        if self.max_step_s is not None:
            step_s = self.max_step_s * (ONE_TENANT_FACTOR if num_prompting is None else 1)
        elif num_prompting is None:
            step_s = max(AUTO_LONG_STEP_S, ONE_TENANT_FACTOR * AUTO_LIGHT_STEPS * light_s)
        else:
            light_steps = AUTO_LIGHT_STEPS + LIGHT_STEPS_PER_TENANT * max(num_prompting - 2, 0)
            light_steps += LIGHT_STEPS_PER_WAITING * max(least_waiting - 1, 0)
            longer_s = min(light_steps * light_s, AUTO_LONG_STEP_S)
            step_s = max(AUTO_STEP_S, AUTO_LIGHT_STEPS * light_s, longer_s)
        tokens = max(MIN_TOKENS, self._tokens_of(step_s - light_s))
        return max(MIN_TOKENS, round((1 + self._dither) * tokens))

    def as_long_as_decoding(self, num_decode_tokens: int, num_positions: int = 0) -> int:
        """Prompt tokens that take as long as a step with these decode tokens alone; 0 while nothing is known."""
        return 0 if self._fit is None else self._tokens_of(self._light_s(num_decode_tokens, num_positions))

    def prompt_seconds(self, num_decode_tokens: int, num_positions: int = 0) -> tuple[float, float]:
        """Seconds that a prompt token takes, and those of a step with these decode tokens alone; 0 while nothing is
        known."""
        if self._fit is None:
            return 0.0, 0.0
        return self._fit.coefficients[-1], self._light_s(num_decode_tokens, num_positions) if num_decode_tokens else 0.0

    def _light_s(self, num_decode_tokens: int, num_positions: int) -> float:
        """Seconds of a step without prompts."""
        assert self._fit is not None
        return self._fit.at([1.0, num_decode_tokens, _KILO * num_positions, 0.0])

    def _tokens_of(self, seconds: float) -> int:
        """Prompt tokens that take as long."""
        assert self._fit is not None
        return int(min(seconds / max(self._fit.coefficients[-1], TINY_S), MOST_TOKENS))
