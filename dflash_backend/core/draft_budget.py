"""How many drafts a step verifies where each has a chance of its own: as many as make the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dflash_backend.core.arrays import Counts, Floats


def optimal_budget(
    num_rows: int,
    chances: Floats,
    seconds: Callable[[Counts], Floats],
    choices: Sequence[int] | None = None,
) -> tuple[int, float]:
    """The number of drafts to verify and the tokens per second that it makes, where the likeliest drafts are verified.

    num_rows: tokens that come without drafts. chances: `[n]`, of each draft that it and all before it in its row are
    accepted. seconds: of steps that verify some number of drafts, `[m]` -> `[m]`. choices: those that there are beside
    0, in ascending order; None: any.
    """
    tokens = np.full(len(chances) + 1, float(num_rows))
    tokens[1:] += np.sort(chances)[::-1].cumsum()
    num_drafts = np.arange(len(tokens)) if choices is None else np.array([0, *choices])
    rates = tokens[np.minimum(num_drafts, len(chances))] / seconds(num_drafts)
    optimal = int(rates.argmax())
    return int(num_drafts[optimal]), float(rates[optimal])


def optimal_budget_of_few(num_rows: int, chances: list[float], seconds: Callable[[int], float]) -> int:
    """The number of drafts of `optimal_budget` without arrays, which for a handful of drafts take longer."""
    optimal, tokens = 0, float(num_rows)
    highest = tokens / seconds(0)
    for count, chance in enumerate(sorted(chances, reverse=True), 1):
        tokens += chance
        rate = tokens / seconds(count)
        if rate > highest:
            optimal, highest = count, rate
    return optimal
