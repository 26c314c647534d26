"""A line through what was measured, which follows what changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

# By default, part of the weight of what was observed that stays after another observation; a hundred
# of them count.
FIT_FORGETTING = 0.99
# Relative noise of a measured time, and how much longer than expected one counts as: another program had the processor.
NOISE = 0.15
MAX_RATIO = 2.0
# Rounds of coordinate descent after an observation. It begins where the one before ended.
ROUNDS = 3


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
        return float(sum(map(mul, self.coefficients, features)))

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take in a measured value, above 0."""
        coefficients, kept = self.coefficients, self._forgetting
        expected = sum(map(mul, coefficients, features))
        value = min(value, MAX_RATIO * expected) if expected > 0 else value
        weight = 1 / max(expected, value / MAX_RATIO) ** 2
        equations = []
        for i, x in enumerate(features):
            weighted = weight * x
            row = self._products[i] = [
                kept * a + weighted * y for a, y in zip(self._products[i], features, strict=True)
            ]
            self._values[i] = kept * self._values[i] + weighted * value
            prior = self._prior_weights[i]
            equations.append((i, row, row[i], self._values[i] + prior * self._prior[i], row[i] + prior))
        # Bring the coefficients closer to the best ones, one after the other.
        for _ in range(ROUNDS):
            for i, row, own, wanted, total in equations:
                solution = (wanted - sum(map(mul, row, coefficients)) + own * coefficients[i]) / total
                coefficients[i] = solution if solution > 0 else 0.0

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
