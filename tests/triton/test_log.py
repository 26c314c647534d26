"""The `log_level` setting decides which of our lines reach Triton's log."""

from __future__ import annotations

import pytest

from dflash_backend.triton.log import LEVELS, Log
from tests.triton.fake_triton import FakeTriton


@pytest.mark.parametrize("level", LEVELS)
def test_lines_below_the_level_are_dropped(level):
    triton = FakeTriton()
    log = Log(triton, level)
    for name in LEVELS:
        getattr(log, name)(name)
    texts = {"debug": "dflash: debug: debug"}
    assert triton.lines == [texts.get(name, f"dflash: {name}") for name in LEVELS[LEVELS.index(level) :]]


def test_only_the_debug_level_is_debugging():
    assert [Log(FakeTriton(), level).debugging for level in LEVELS] == [True, False, False, False]
