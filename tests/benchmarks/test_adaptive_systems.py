"""What `python -m benchmarks.adaptive` compares, and what it calls a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.adaptive.__main__ import misses
from benchmarks.adaptive.cells import Cell, ClosedLoop, Rates
from benchmarks.adaptive.systems import ADAPTIVE, FIXED, INJECT, NONE, models_loaded_once
from benchmarks.worse_drafters import shifted_drafter
from dflash_backend import LLM


def test_engines_have_one_copy_of_each_model_and_their_own_kv(tmp_path: Path) -> None:
    small: dict[str, Any] = {"kv_cache_gb": 0.01, "max_model_len": 128, "max_num_seqs": 2}
    with models_loaded_once():
        fixed, adaptive, none = (
            LLM(**settings, **small) for settings in ({"adaptive_speculation": False}, {}, {"draft": ""})
        )
        shifted = LLM(draft=str(shifted_drafter(-1, tmp_path)), **small).engine.runner.model.drafter
    steps = [llm.engine.runner.model for llm in (fixed, adaptive, none)]
    assert steps[0].target is steps[1].target is steps[2].target
    assert steps[2].drafter is None
    assert shifted is not None
    assert steps[1].drafter is not None
    assert shifted.capture != steps[1].drafter.capture
    assert len({id(step.kv) for step in steps}) == 3
    texts = [
        llm.generate(["What is 3 + 4?"], max_tokens=24, temperature=0)[0].token_ids for llm in (fixed, adaptive, none)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert LLM(draft="", **small).engine.runner.model.target is not steps[0].target


def test_streams_begin_as_if_they_had_been_there_for_long() -> None:
    llm = LLM(draft="", kv_cache_gb=0.02, max_model_len=512, max_num_seqs=4)
    prompts = [[*range(100, 300), last] for last in range(7)]
    loop = ClosedLoop(llm, prompts, 3)
    waiting = llm.engine.core.scheduler.queue.waiting
    assert [request.sampling.max_tokens for request in waiting.values()] == [32, 64, 96]
    num_tokens = loop.step()
    assert llm.stats().prefix_cache_hits >= 3 * 192, "they find what all prompts begin with"
    num_tokens += sum(loop.step() for _ in range(39))
    assert 3 * 38 <= num_tokens <= 3 * 40
    loop.end()
    assert not llm.engine.core.has_unfinished()


@pytest.mark.parametrize(
    ("drafter", "rates", "missed"),
    [
        ("demo", {NONE: 100.0, FIXED: 300.0, ADAPTIVE: 286.0}, []),
        ("demo", {NONE: 100.0, FIXED: 300.0, ADAPTIVE: 284.0}, ["adaptive has 0.947 of none or fixed k, below 0.95"]),
        ("random", {NONE: 100.0, FIXED: 40.0, INJECT: 96.0, ADAPTIVE: 93.5}, []),
        (
            "random",
            {NONE: 100.0, FIXED: 40.0, INJECT: 96.0, ADAPTIVE: 92.0},
            ["adaptive has 0.920 of none or fixed k, below 0.93", "adaptive has 0.958 of none, injecting, below 0.97"],
        ),
    ],
)
def test_a_ratio_below_its_bound_is_a_miss(drafter: str, rates: dict[str, float], missed: list[str]) -> None:
    cell = Cell(drafter, 1, 100, "math")
    found = misses(cell, Rates({name: [rate] * 3 for name, rate in rates.items()}))
    assert found == [f"{cell}: {sentence}" for sentence in missed]
