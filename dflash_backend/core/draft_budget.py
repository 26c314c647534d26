"""How many drafts a step verifies where each has a chance of its own: as many as make the most tokens a second."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence


def optimal_budget(
    num_rows: int, chances: Iterable[float], seconds: Callable[[int], float], choices: Sequence[int] | None = None
) -> tuple[int, float]:
    """The number of drafts to verify and the tokens per second that it makes, where the likeliest drafts are verified.

    num_rows: tokens that come without drafts. chances: of each draft, that it and all before it in its row are
    accepted. seconds: of a step that verifies a number of drafts. choices: those that there are beside 0; None: any.
    """
    tokens = list(itertools.accumulate(sorted(chances, reverse=True), initial=float(num_rows)))
    optimal, highest = 0, tokens[0] / seconds(0)
    for num_drafts in range(1, len(tokens)) if choices is None else choices:
        rate = tokens[min(num_drafts, len(tokens) - 1)] / seconds(num_drafts)
        if rate > highest:
            optimal, highest = num_drafts, rate
    return optimal, highest
