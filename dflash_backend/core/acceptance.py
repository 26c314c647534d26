"""How likely the drafts of a row are to be accepted, estimated from those that were.

The chance that a draft is accepted when all before it in its block are has four parts, added as logits: one for its
position in the block, a level that follows the traffic within a few steps, an effect of the request, and a weight times
the drafter's confidence in it. A draft tells something only when it was verified and all before it were accepted. Which
drafts are verified follows from these parts alone, and the chance is one given all of them: so what was left out does
not distort it. How confident the drafter is shows in all drafts that it proposed, verified or not.

A confidence is a number that rises with the drafter's own chance of the token; the estimate learns what it is worth.
A drafter may give none: 0 for each draft, which changes nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

# Before anything is known a draft is accepted with this chance; as much is known then as from this many drafts.
PRIOR_RATE = 0.85
PRIOR_TRIALS = 4.0
# Blocks that the rates by position remember.
MEMORY_BLOCKS = 1000.0
# Variance of the level and of a request's effect at first, and what they gain in a step and in a block.
LEVEL_VARIANCE, LEVEL_DRIFT = 4.0, 0.02
EFFECT_VARIANCE, EFFECT_DRIFT = 0.3, 0.005
# Variance of the weight of a confidence, which is 0 at first, what it gains in a step, and the largest weight.
WEIGHT_VARIANCE, WEIGHT_DRIFT = 0.5, 1e-4
MAX_WEIGHT = 3.0
# Of the blocks every fourth shows what confidences there are: these change slowly, and looking takes time.
MEASURED_BLOCKS = 4
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

    trials, accepted: drafts at each position that were verified behind accepted ones, and those accepted, at a usual
    confidence; older ones count less. level, variance: the level of all. weight, weight_variance: how much a
    confidence counts. covariance: of the two.
    """

    k: int
    trials: list[float] = field(init=False)
    accepted: list[float] = field(init=False)
    level: float = 0.0
    variance: float = LEVEL_VARIANCE
    weight: float = 0.0
    weight_variance: float = WEIGHT_VARIANCE
    covariance: float = 0.0
    _num_blocks: int = 0  # of this step
    _num_measured: int = 0  # blocks so far that had confidences
    _surprise: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _information: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    _rates: list[float] = field(default_factory=list)  # of all steps before this one
    _logits: list[float] = field(default_factory=list)
    _means: list[float] = field(init=False)  # the usual confidences
    _moments: list[Moments] = field(init=False)

    def __post_init__(self) -> None:
        self.trials = [0.0] * self.k
        self.accepted = [0.0] * self.k
        self._means = [0.0] * self.k
        self._moments = [Moments() for _ in range(self.k)]
        self._update_rates()

    def rates(self) -> list[float]:
        """For each position the share of drafts accepted behind accepted ones, at a usual confidence. What is not
        known of a position is taken from the one before it."""
        rates, before = [], PRIOR_RATE
        for trials, accepted in zip(self.trials, self.accepted, strict=True):
            before = min(max((accepted + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS), 0.0), 1.0)
            rates.append(before)
        return rates

    def chances(self, group: int) -> list[float]:
        """For requests of a group: the chance of each draft to be accepted when those before it are, whatever the
        drafter's confidence."""
        return self._chances(self.level + group * EFFECT_STEP)

    def survival(self, group: int, hopeful: bool = False) -> list[float]:
        """For requests of a group: the chance of each draft that it and all before it are accepted, whatever the
        drafter's confidence. `hopeful`: with a level as high as it may well be."""
        shift = self.level + group * EFFECT_STEP
        if hopeful:
            shift += OPTIMISM * math.sqrt(self.variance)
        return list(itertools.accumulate(self._chances(shift), operator.mul))

    def block_survival(
        self, offsets: Sequence[float], effect: RequestEffect, num_draft: int, confidences: Sequence[float]
    ) -> list[float]:
        """For the drafts of one block: the chance of each that it and all before it are accepted. Where a confidence is
        not known it is a usual one. offsets: as `offsets` gives them."""
        known = list(confidences[:num_draft])
        known += self._means[len(known) : num_draft]
        survival, product = [], 1.0
        for offset, confidence in zip(offsets, known, strict=False):
            product *= _sigmoid(offset + effect.value + self.weight * confidence)
            survival.append(product)
        return survival

    def offsets(self, hopeful: bool = False) -> list[float]:
        """For each position what is added to `weight` times the confidence and to the request's effect: their sum is
        the logit of the chance."""
        level = self.level + (OPTIMISM * math.sqrt(self.variance) if hopeful else 0.0)
        return [logit + level - self.weight * mean for logit, mean in zip(self._logits, self._means, strict=True)]

    @property
    def spread(self) -> float:
        """How much the confidence tells: the standard deviation, as a logit, of what it adds to a chance (the mean over
        positions)."""
        return self.weight * sum(math.sqrt(moments.variance) for moments in self._moments) / self.k

    def observe(
        self, effect: RequestEffect, num_draft: int, num_accepted: int, confidences: Sequence[float] = ()
    ) -> list[float]:
        """Take in a block of which `num_draft` drafts were verified. confidences: of all drafts that were proposed;
        empty: the drafter gave none. Returns the chance of each verified draft that it and all before it are accepted,
        as it was estimated before."""
        if confidences:
            self._measure(effect, confidences)
        tried = min(num_accepted + 1, num_draft)
        expected, product = [], 1.0
        surprise = information = 0.0
        for position in range(num_draft):
            usual = self._logits[position] + effect.value
            confidence = 0.0
            if confidences:
                confidence = confidences[position] - self._means[position]
                usual += self.weight * confidence
            chance = _sigmoid(usual + self.level)
            product *= chance
            expected.append(product)
            if position >= tried:
                continue
            accepted = position < num_accepted
            spread = chance * (1 - chance)
            surprise += accepted - chance
            information += spread
            self._surprise[1] += (accepted - chance) * confidence
            self._information[1] += spread * confidence
            self._information[2] += spread * confidence * confidence
            # As a request without an effect would have fared, at a usual confidence: likelier ones are drafted more.
            self.trials[position] += 1
            self.accepted[position] += accepted + self._rates[position] - _sigmoid(usual)
        self._surprise[0] += surprise
        self._information[0] += information
        self._num_blocks += 1
        if num_draft:
            gain = effect.variance / (1 + effect.variance * information)
            effect.value = min(max(effect.value + gain * surprise, -MAX_LOGIT), MAX_LOGIT)
            effect.variance = min(gain + EFFECT_DRIFT, EFFECT_VARIANCE)
        return expected

    def drift(self) -> None:
        """Become less certain: a step has gone by without drafts."""
        self.variance = min(self.variance + LEVEL_DRIFT, LEVEL_VARIANCE)

    def end_step(self) -> None:
        """Take in the blocks of a step together."""
        if not self._information[0]:
            self.drift()
        else:
            self._update_level()
        if self._num_blocks:
            keep = math.exp(-self._num_blocks / MEMORY_BLOCKS)
            self.trials = [keep * trials for trials in self.trials]
            self.accepted = [keep * accepted for accepted in self.accepted]
            for moments in self._moments:
                moments.decay(keep)
            self._update_rates()
        self._num_blocks = 0
        self._surprise, self._information = [0.0, 0.0], [0.0, 0.0, 0.0]

    def _update_level(self) -> None:
        """Bring level and weight together to where the step's drafts put them: a step of Newton's method from what was
        known (an extended Kalman filter of two numbers)."""
        (surprise, of_weight), (here, both, there) = self._surprise, self._information
        determinant = self.variance * self.weight_variance - self.covariance**2
        level_precision = self.weight_variance / determinant + here
        weight_precision = self.variance / determinant + there
        between = both - self.covariance / determinant
        determinant = level_precision * weight_precision - between**2
        variance, weight_variance = weight_precision / determinant, level_precision / determinant
        covariance = -between / determinant
        level = self.level + variance * surprise + covariance * of_weight
        weight = self.weight + covariance * surprise + weight_variance * of_weight
        self.level = min(max(level, -MAX_LOGIT), MAX_LOGIT)
        self.weight = min(max(weight, 0.0), MAX_WEIGHT)
        self.variance = min(variance + LEVEL_DRIFT, LEVEL_VARIANCE)
        self.weight_variance = min(weight_variance + WEIGHT_DRIFT, WEIGHT_VARIANCE)
        # Within what the two variances allow.
        most = 0.9 * math.sqrt(self.variance * self.weight_variance)
        self.covariance = min(max(covariance, -most), most)

    def _measure(self, effect: RequestEffect, confidences: Sequence[float]) -> None:
        """Note the confidences of a block's drafts, each as far as those before it are likely to be accepted."""
        self._num_measured += 1
        if self._num_measured % MEASURED_BLOCKS and self._num_measured > MEASURED_BLOCKS:
            return
        weight = 1.0
        for moments, confidence, offset in zip(self._moments, confidences, self.offsets(), strict=False):
            moments.add(weight, confidence)
            weight *= _sigmoid(offset + effect.value + self.weight * confidence)
        if self._num_measured <= MEASURED_BLOCKS:
            self._means = [moments.mean for moments in self._moments]

    def _chances(self, shift: float) -> list[float]:
        # The mean of a sigmoid over a normal distribution, approximately (MacKay 1992).
        weight = math.pi / 8 * self.weight**2
        return [
            _sigmoid((logit + shift) / math.sqrt(1 + weight * moments.variance))
            for logit, moments in zip(self._logits, self._moments, strict=True)
        ]

    def _update_rates(self) -> None:
        self._rates = self.rates()
        self._means = [moments.mean for moments in self._moments]
        self._logits = [_logit(rate) for rate in self._rates]


@dataclass(slots=True)
class Moments:
    """Mean and variance of the confidences at a position; older ones count less."""

    total: float = 0.0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, weight: float, value: float) -> None:
        """Take in a value."""
        self.total += weight
        self.sum += weight * value
        self.squares += weight * value * value

    def decay(self, keep: float) -> None:
        """Let everything so far count for this part of what it did."""
        self.total *= keep
        self.sum *= keep
        self.squares *= keep

    @property
    def mean(self) -> float:
        """0 without values."""
        return self.sum / self.total if self.total > 0 else 0.0

    @property
    def variance(self) -> float:
        """0 without values."""
        return max(self.squares / self.total - self.mean**2, 0.0) if self.total > 0 else 0.0


def _logit(rate: float) -> float:
    rate = min(max(rate, 1e-3), 1 - 1e-3)
    return math.log(rate / (1 - rate))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -MAX_LOGIT), MAX_LOGIT)))
