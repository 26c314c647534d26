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


@pytest.mark.parametrize(("level", "as_vllm", "lines"), [("info", True, 1), ("info", False, 0), ("warning", True, 0)])
def test_a_line_of_the_vllm_backend_is_there_only_where_the_model_stands_in_for_one(level, as_vllm, lines):
    triton = FakeTriton()
    Log(triton, level, as_vllm).vllm("Cancelling the request")
    assert triton.lines == ["dflash: [vllm] Cancelling the request"] * lines
