"""How much the tests do whose number of rounds is free: `TEST_SCALE` in the environment multiplies every such number.

`make test` leaves it at 1, `make test-fast` sets 0.1, `make nightly` 4.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

NIGHTLY_SCALE = 4.0
SCALE = float(os.environ.get("TEST_SCALE", "1"))


def scaled(count: int, at_least: int = 1) -> int:
    """`count` rounds at this scale, and never fewer than `at_least`, below which the test would show nothing."""
    return max(min(count, at_least), round(count * SCALE))


def by_night(*values: Any) -> Any:
    """A parameter, or some at once, whose test `make test` leaves to `make nightly`."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def others_by_night(values: Iterable[str], by_day: Collection[str]) -> list[Any]:
    """The values as parameters, of which `make test` has those of `by_day`, and `make nightly` the others."""
    values = list(values)
    assert set(by_day) <= set(values), f"no such case: {set(by_day) - set(values)}"
    return [value if value in by_day else by_night(value) for value in values]


def one_in(count: int, *axes: Sequence[Any]) -> list[Any]:
    """Every combination of the values of all axes, of which `make test` has one in `count`: each value of an axis with
    others of the next, and `make nightly` has all."""
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values) if sum(places) % count == 0 else by_night(*values))
    return found
