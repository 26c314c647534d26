"""How likely the drafts of a row are to be accepted, estimated from those that were.

The chance that a draft is accepted when all before it in its block are has three parts, added as logits: one for its
position in the block, a level that follows the traffic within a few steps, and an effect of the request. A draft tells
something only when it was verified and all before it were accepted, and this chance does not depend on how many more
were verified: so what was left out does not distort it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

# Before anything is known a draft is accepted with this chance; as much is known then as from this many drafts.
PRIOR_RATE = 0.85
PRIOR_TRIALS = 4.0
# Blocks that the rates by position remember.
MEMORY_BLOCKS = 1000.0
# Variance of the level and of a request's effect at first, and what they gain in a step and in a block.
LEVEL_VARIANCE, LEVEL_DRIFT = 4.0, 0.02
EFFECT_VARIANCE, EFFECT_DRIFT = 0.3, 0.005
# No chance is estimated as closer to 0 or 1 than this logit says.
MAX_LOGIT = 6.0
# Requests are taken together whose effects differ by less than this.
EFFECT_STEP = 0.5
# Decisions take level and effects to be higher than estimated, by this many standard deviations.
OPTIMISM = 0.2


@dataclass(slots=True)
class RequestEffect:
    """How much better than others a request's drafts are accepted, as a logit, and the variance of that estimate."""

    value: float = 0.0
    variance: float = EFFECT_VARIANCE

    @property
    def group(self) -> int:
        """Requests of one group have the same chances."""
        return round(self.value / EFFECT_STEP)

    @property
    def hopeful_group(self) -> int:
        """The group that it may well belong to: drafts are tried where little is known."""
        return round((self.value + OPTIMISM * math.sqrt(self.variance)) / EFFECT_STEP)

    def drift(self) -> None:
        """Become less certain: a step has gone by without drafts of the request."""
        self.variance = min(self.variance + EFFECT_DRIFT, EFFECT_VARIANCE)


@dataclass
class AcceptanceEstimator:
    """The estimate, for blocks of at most `k` drafts.

    trials, accepted: drafts at each position that were verified behind accepted ones, and those accepted; older ones
    count less. level, variance: the level of all.
    """

    k: int
    trials: list[float] = field(init=False)
    accepted: list[float] = field(init=False)
    level: float = 0.0
    variance: float = LEVEL_VARIANCE
    _blocks: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _groups: dict[int, tuple[list[float], list[float], list[float]]] = field(default_factory=dict)
    _logit_cache: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trials = [0.0] * self.k
        self.accepted = [0.0] * self.k

    def rates(self) -> list[float]:
        """For each position the share of drafts accepted behind accepted ones. What is not known of a position is taken
        from the one before it."""
        rates, before = [], PRIOR_RATE
        for trials, accepted in zip(self.trials, self.accepted, strict=True):
            before = min(max((accepted + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS), 0.0), 1.0)
            rates.append(before)
        return rates

    def chances(self, group: int) -> list[float]:
        """For requests of a group: the chance of each draft to be accepted when those before it are."""
        return self._group(group)[0]

    def survival(self, group: int, hopeful: bool = False) -> list[float]:
        """For requests of a group: the chance of each draft that it and all before it are accepted. `hopeful`: with a
        level as high as it may well be."""
        shift = self.level + group * EFFECT_STEP
        if hopeful:
            shift += OPTIMISM * math.sqrt(self.variance)
        survival, product = [], 1.0
        for logit in self._logits():
            product *= _sigmoid(logit + shift)
            survival.append(product)
        return survival

    def observe(self, effect: RequestEffect, num_draft: int, num_accepted: int) -> None:
        """Take in a block of `num_draft` verified drafts, at least one."""
        group = effect.group
        tried = min(num_accepted + 1, num_draft)
        self._blocks[group, tried, num_accepted] += 1
        _, expected, information = self._group(group)
        gain = effect.variance / (1 + effect.variance * information[tried - 1])
        effect.value += gain * (num_accepted - expected[tried - 1])
        effect.value = min(max(effect.value, -MAX_LOGIT), MAX_LOGIT)
        effect.variance = min(gain + EFFECT_DRIFT, EFFECT_VARIANCE)

    def drift(self) -> None:
        """Become less certain: a step has gone by without drafts."""
        self.variance = min(self.variance + LEVEL_DRIFT, LEVEL_VARIANCE)

    def end_step(self) -> None:
        """Take in the blocks of a step together."""
        if not self._blocks:
            self.drift()
            return
        surprise = information = 0.0
        logits, rates = self._logits(), self.rates()
        keep = math.exp(-sum(self._blocks.values()) / MEMORY_BLOCKS)
        self.trials = [keep * trials for trials in self.trials]
        self.accepted = [keep * accepted for accepted in self.accepted]
        for (group, tried, num_accepted), count in self._blocks.items():
            chances = self.chances(group)
            for position in range(tried):
                chance, accepted = chances[position], position < num_accepted
                surprise += count * (accepted - chance)
                information += count * chance * (1 - chance)
                # As a request without an effect would have fared: those with a good one draft more.
                usual = rates[position] - _sigmoid(logits[position] + group * EFFECT_STEP)
                self.trials[position] += count
                self.accepted[position] += count * (accepted + usual)
        gain = self.variance / (1 + self.variance * information)
        self.level = min(max(self.level + gain * surprise, -MAX_LOGIT), MAX_LOGIT)
        self.variance = min(gain + LEVEL_DRIFT, LEVEL_VARIANCE)
        self._blocks.clear()
        self._groups.clear()
        self._logit_cache.clear()

    def _logits(self) -> list[float]:
        """`rates` as logits."""
        if not self._logit_cache:
            self._logit_cache = [_logit(rate) for rate in self.rates()]
        return self._logit_cache

    def _group(self, group: int) -> tuple[list[float], list[float], list[float]]:
        """For requests of a group: the chances by position, and the sums up to there of the chances and of what a trial
        tells."""
        found = self._groups.get(group)
        if found is None:
            shift = self.level + group * EFFECT_STEP
            chances = [_sigmoid(logit + shift) for logit in self._logits()]
            information = itertools.accumulate(chance * (1 - chance) for chance in chances)
            found = self._groups[group] = chances, list(itertools.accumulate(chances)), list(information)
        return found


def _logit(rate: float) -> float:
    rate = min(max(rate, 1e-3), 1 - 1e-3)
    return math.log(rate / (1 - rate))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -MAX_LOGIT), MAX_LOGIT)))
