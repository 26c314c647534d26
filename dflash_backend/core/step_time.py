"""How long a step takes, and how many prompt tokens it may have so that it does not take too long: by what recent steps
took.

A step's time is taken as a line over what it consists of: something fixed, its decode tokens, the positions that its
rows attend to, and its prompt tokens. From the time that a step may take, and what it takes without prompts, follows
how many prompt tokens it may have. Where the line is wrong, their number is, and the next step's time corrects both.

Where every step has as many prompt tokens as it may, the line could give them the decode rows' time: it would be as
right, and leave them fewer tokens. So steps may have some more and some fewer in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_backend.core.linear_fit import LinearFit
from dflash_backend.core.request import Request
from dflash_backend.core.tenants import FairQueue

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
# After a few steps without prompts and with about as many decode tokens (no more than these count as these), one in
# four is observed: they add little.
FEW, EVERY, FEW_TOKENS = 8, 4, 16
# Part of a step's weight that stays after another one: some thirty count.
FORGETTING = 0.97
# Steps may have this part more and this part fewer than the tokens that take the time in turn, so that it shows what
# they take.
DITHER = 0.25
# For this long after several tenants had requests, steps stay as short as several need them: who asks again soon, as
# people and agents do, does not meet a long step each time.
SEVERAL_TENANTS_S = 5.0
# While nothing decodes, and one tenant has requests, a step takes all prompts that are left if they are no more than
# this many times those that its time allows: else the last ones would be computed beside the first answers, whose
# tokens would come late.
LAST_PROMPTS = 2
# Before steps have shown it: this part of a step's time does not depend on its tokens.
FIXED_SHARE = 0.5
# A prompt token is taken to last no less, and a step to have no more.
TINY_S, MOST_TOKENS = 1e-9, 1 << 30
_KILO = 1e-3


@dataclass(slots=True)
class StepTime:
    """The estimate. `max_step_s` is the bound while several tenants are served; None: auto."""

    max_step_s: float | None = None
    _fit: LinearFit | None = None  # None before a step had prompts
    _num_plain: int = 0  # steps without prompts since their decode tokens were so few or many
    _plain_size: int = 0  # the bits of their number
    _dither: float = DITHER

    def observe(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float, num_positions: int = 0) -> None:
        """Take in a step that has run. num_positions: that its rows attend to."""
        if seconds <= 0:
            return
        self._dither = -self._dither
        if not num_prefill_tokens:
            size = max(num_decode_tokens, FEW_TOKENS).bit_length()
            self._num_plain = self._num_plain + 1 if size == self._plain_size else 1
            self._plain_size = size
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


class PrefillBound:
    """How many prompt tokens a step may have: as few as its time allows while several tenants are served."""

    def __init__(self, max_step_s: float | None = None) -> None:
        """max_step_s: as of `StepTime`."""
        self.step_time = StepTime(max_step_s)
        self._several_until = 0.0  # until when the tenants count as several
        self._num_left = 0  # tenants that had left at the last plan
        self._left_until = 0.0  # until when one that left counts as one of whose requests none waits

    def max_prefill_tokens(
        self,
        queue: FairQueue,
        in_prefill: Sequence[Request],
        now: float,
        num_prompt_tokens: int,
        num_decode_tokens: int,
        num_positions: int,
    ) -> int | None:
        """Prompt tokens of the step that is planned, at most; None while nothing is known. in_prefill: the running
        requests that do not decode. num_prompt_tokens: left of all prompts, also those of waiting requests.
        num_positions: that the rows attend to."""
        if len(queue.tenants) > 1:
            self._several_until = now + SEVERAL_TENANTS_S
        if queue.num_left != self._num_left:
            self._num_left, self._left_until = queue.num_left, now + SEVERAL_TENANTS_S
        num_prompting, least_waiting = None, 0
        if now < self._several_until:
            num_prompting = queue.num_prompting(in_prefill)
            least_waiting = queue.least_waiting if now >= self._left_until else 0
        most = self.step_time.max_prefill_tokens(num_decode_tokens, num_prompting, least_waiting, num_positions)
        if most is None or num_prompting is not None or num_decode_tokens or num_prompt_tokens > LAST_PROMPTS * most:
            return most
        return max(most, num_prompt_tokens)
