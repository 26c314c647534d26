"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 30.0


def eventually(reached: Callable[[], T], what: object = "it", within_s: float = WAIT_S) -> T:
    """The first true result of `reached`, asked every 50 ms. Fails with `what` after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not (result := reached()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return result
