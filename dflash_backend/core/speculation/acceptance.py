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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_backend.core.speculation.costs import Bools, Floats

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
# Until this many blocks were seen, usual confidences are those of the step itself.
MEASURED_BLOCKS = 4
# No chance is estimated as closer to 0 or 1 than this logit says.
MAX_LOGIT = 6.0
# Requests are taken together whose effects differ by less than this.
EFFECT_STEP = 0.5
# In place of 0 as a divisor.
TINY = 1e-12
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

    def drift(self, num_decisions: float) -> None:
        """Become less certain: it was decided this many times that the request drafts nothing."""
        self.variance = min(self.variance + num_decisions * EFFECT_DRIFT, EFFECT_VARIANCE)


class VerifiedBlock(NamedTuple):
    """A block of drafts that was verified: `num_draft` of them, of which `num_accepted` were accepted. confidences: of
    all drafts that were proposed; empty: the drafter gave none."""

    effect: RequestEffect
    num_draft: int
    num_accepted: int
    confidences: Sequence[float] = ()


class Moments:
    """Mean and variance of the confidences at each position, float64 `[k]`; older ones count less."""

    def __init__(self, k: int) -> None:
        self.sums = np.zeros((3, k))
        """Of weights, of values and of their squares, each by its weight."""

    def add(self, weights: Floats, values: Floats) -> None:
        """Take in values of some blocks, both `[n, k]`."""
        weighted = weights * values
        self.sums += np.stack((weights, weighted, weighted * values)).sum(axis=1)

    @property
    def mean(self) -> Floats:
        """0 where there are no values."""
        return np.asarray(self.sums[1] / np.maximum(self.sums[0], TINY))

    @property
    def variance(self) -> Floats:
        """0 where there are no values."""
        return np.asarray(np.maximum(self.sums[2] / np.maximum(self.sums[0], TINY) - self.mean**2, 0.0))


class AcceptanceEstimator:
    """The estimate, for blocks of at most `k` drafts.

    trials, accepted: drafts at each position that were verified after accepted ones, and those accepted, at a usual
    confidence, float64 `[k]`; older ones count less. level, variance: the level of all. weight, weight_variance: how
    much a confidence counts. covariance: of the two.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.trials, self.accepted = np.zeros(k), np.zeros(k)
        self.level, self.variance = 0.0, LEVEL_VARIANCE
        self.weight, self.weight_variance, self.covariance = 0.0, WEIGHT_VARIANCE, 0.0
        self._blocks: list[VerifiedBlock] = []  # that `update` takes in
        self._num_measured = 0  # blocks so far that had confidences
        self._position = np.arange(k)
        self._moments = Moments(k)
        self._means: Floats = self._moments.mean  # the usual confidences
        self._update_rates()

    def rates(self) -> list[float]:
        """For each position the share of drafts accepted after accepted ones, at a usual confidence. What is not
        known of a position is taken from the one before it."""
        rates, before = [], PRIOR_RATE
        for trials, accepted in zip(self.trials.tolist(), self.accepted.tolist(), strict=True):
            before = min(max((accepted + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS), 0.0), 1.0)
            rates.append(before)
        return rates

    def survival(self, group: int, hopeful: bool = False) -> Floats:
        """For requests of a group: the chance of each draft that it and all before it are accepted, whatever the
        drafter's confidence, `[k]`. `hopeful`: with a level as high as it may well be."""
        shift = self.level + group * EFFECT_STEP
        if hopeful:
            shift += OPTIMISM * math.sqrt(self.variance)
        return _sigmoid(self._slopes * (self._logits + shift)).cumprod()

    def block_survival(
        self,
        offsets: Floats,
        effects: Iterable[RequestEffect],
        num_draft: Sequence[int],
        confidences: Iterable[Sequence[float]],
    ) -> Floats:
        """For the drafts of some blocks: the chance of each that it and all before it are accepted, `[n, k]`, and 0
        after the `num_draft` of its block. Where a confidence is not known it is a usual one. offsets: as `offsets`
        gives them."""
        logits = self.weight * self._padded(confidences, self._means)
        logits += offsets
        logits += np.array([[effect.value] for effect in effects])
        survival = _sigmoid(logits).cumprod(axis=1)
        if min(num_draft) < self.k:
            survival[self._position >= np.array(num_draft)[:, None]] = 0.0
        return survival

    def offsets(self, hopeful: bool = False) -> Floats:
        """For each position what is added to `weight` times the confidence and to the request's effect: their sum is
        the logit of the chance, `[k]`."""
        level = self.level + (OPTIMISM * math.sqrt(self.variance) if hopeful else 0.0)
        return self._logits + level - self.weight * self._means

    @property
    def spread(self) -> float:
        """How much the confidence tells: the standard deviation, as a logit, of what it adds to a chance (the mean over
        positions)."""
        return self._spread

    def observe(self, block: VerifiedBlock) -> None:
        """Note a block; `update` takes it in."""
        self._blocks.append(block)

    def update(self, num_steps: int = 1) -> Floats:
        """Take in the blocks of some steps together. Returns for each position, `[k]`, the sum of the chances of the
        drafts that were verified there that they and all before them are accepted, as it was estimated before."""
        blocks, self._blocks = self._blocks, []
        if not blocks:
            self.drift(num_steps)
            return np.zeros(self.k)
        num_draft, num_accepted = np.array([block[1:3] for block in blocks]).T[:, :, None]
        usual = np.array([block.effect.value for block in blocks])[:, None] + self._logits
        confidences, slopes = np.zeros(usual.shape), self._slopes
        if any(block.confidences for block in blocks):
            known = self._position < np.array([len(block.confidences) for block in blocks])[:, None]
            confidences = self._measured([block.confidences for block in blocks], known, usual)
            usual += self.weight * confidences
            slopes = np.where(known, 1.0, slopes)
        chances = _sigmoid(slopes * (usual + self.level))
        verified, accepted = self._position < num_draft, self._position < num_accepted
        tried = (self._position <= num_accepted) & verified
        surprise = tried * (accepted - chances) * slopes
        spread = tried * chances * (1 - chances) * slopes**2
        expected: Floats = (verified * chances.cumprod(axis=1)).sum(axis=0)
        self._update_effects(blocks, surprise.sum(axis=1).tolist(), spread.sum(axis=1).tolist())
        self._update_level(surprise, spread, confidences, num_steps)
        keep = math.exp(-len(blocks) / MEMORY_BLOCKS)
        # As a request without an effect would have fared, at a usual confidence: likelier ones are drafted more.
        corrected = tried * (accepted + self._rates - _sigmoid(slopes * usual))
        self.trials = keep * (self.trials + tried.sum(axis=0))
        self.accepted = keep * (self.accepted + corrected.sum(axis=0))
        self._moments.sums *= keep
        self._update_rates()
        return expected

    def drift(self, num_steps: int = 1) -> None:
        """Become less certain: steps have gone by without drafts."""
        self.variance = min(self.variance + num_steps * LEVEL_DRIFT, LEVEL_VARIANCE)

    def _padded(self, confidences: Iterable[Sequence[float]], padding: Floats) -> Floats:
        """Confidences of blocks, and for drafts without one the `padding` of their position, `[n, k]`."""
        rows = list(confidences)
        if all(len(row) == self.k for row in rows):
            return np.array(rows)
        return np.array([[*row[: self.k], *padding[len(row) :].tolist()] for row in rows])

    def _update_effects(self, blocks: Sequence[VerifiedBlock], surprise: list[float], spread: list[float]) -> None:
        for block, unexpected, information in zip(blocks, surprise, spread, strict=True):
            if not block.num_draft:
                continue
            effect = block.effect
            gain = effect.variance / (1 + effect.variance * information)
            effect.value = min(max(effect.value + gain * unexpected, -MAX_LOGIT), MAX_LOGIT)
            effect.variance = min(gain + EFFECT_DRIFT, EFFECT_VARIANCE)

    def _update_level(self, surprises: Floats, spread: Floats, confidences: Floats, num_steps: int) -> None:
        """Bring level and weight together to where the step's drafts put them: a step of Newton's method from what was
        known (an extended Kalman filter of two numbers). All `[n, k]`, 0 for drafts that tell nothing."""
        weighted = spread * confidences
        here, both, there = float(spread.sum()), float(weighted.sum()), float((weighted * confidences).sum())
        if not here:
            self.drift(num_steps)
            return
        surprise, weight_surprise = float(surprises.sum()), float((surprises * confidences).sum())
        determinant = self.variance * self.weight_variance - self.covariance**2
        level_precision = self.weight_variance / determinant + here
        weight_precision = self.variance / determinant + there
        between = both - self.covariance / determinant
        determinant = level_precision * weight_precision - between**2
        variance, weight_variance = weight_precision / determinant, level_precision / determinant
        covariance = -between / determinant
        level = self.level + variance * surprise + covariance * weight_surprise
        weight = self.weight + covariance * surprise + weight_variance * weight_surprise
        self.level = min(max(level, -MAX_LOGIT), MAX_LOGIT)
        self.weight = min(max(weight, 0.0), MAX_WEIGHT)
        self.variance = min(variance + num_steps * LEVEL_DRIFT, LEVEL_VARIANCE)
        self.weight_variance = min(weight_variance + num_steps * WEIGHT_DRIFT, WEIGHT_VARIANCE)
        # Within what the two variances allow.
        most = 0.9 * math.sqrt(self.variance * self.weight_variance)
        self.covariance = min(max(covariance, -most), most)

    def _measured(self, rows: Sequence[Sequence[float]], known: Bools, usual: Floats) -> Floats:
        """How far the confidences of blocks are from the usual ones, `[n, k]`, 0 where none is known. They are noted,
        each as far as the drafts before it are likely to be accepted.

        known: which there are, `[n, k]`. usual: the logits of the drafts' chances, but for the level, at a usual
        confidence, `[n, k]`."""
        confidences = self._padded(rows, self._means)
        logits = usual + self.level + self.weight * (confidences - self._means)
        before = np.ones(usual.shape)
        before[:, 1:] = _sigmoid(logits[:, :-1]).cumprod(axis=1)
        self._moments.add(before * known, confidences)
        if self._num_measured < MEASURED_BLOCKS:
            self._means = self._moments.mean
        self._num_measured += len(rows)
        return known * (confidences - self._means)

    def _update_rates(self) -> None:
        self._rates = np.array(self.rates())  # of all steps before this one
        self._means, variance = self._moments.mean, self._moments.variance
        # What the logit at a usual confidence is multiplied by for the chance of a draft whose confidence is not known:
        # the mean of a sigmoid over a normal distribution, approximately (MacKay 1992).
        self._slopes: Floats = 1 / np.sqrt(1 + math.pi / 8 * self.weight**2 * variance)
        self._spread = self.weight * float(np.sqrt(variance).sum()) / self.k
        rates = np.minimum(np.maximum(self._rates, 1e-3), 1 - 1e-3)
        self._logits: Floats = np.log(rates / (1 - rates))


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.minimum(np.maximum(logits, -MAX_LOGIT), MAX_LOGIT))))
