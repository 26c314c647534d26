"""How much the tests do whose number of rounds is free: `TEST_SCALE` in the environment multiplies every such number.

`make test` leaves it at 1, `make test-fast` sets 0.1, `make nightly` 4.
"""

from __future__ import annotations

import os
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
