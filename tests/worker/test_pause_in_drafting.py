"""A request whose drafting rests for a while: the drafter's context is written all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_backend import LLM
from dflash_backend.core.speculation.policy import AdaptiveSpeculation, SpeculatingRow
from dflash_backend.spec_stats import SpecDecodingStats
from load_tests.prompts import load_prompts
from tests.worker.engines import Outputs, engine

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
NUM_RESTING, NUM_TOKENS = 24, 60


class Script:
    """Decides as it is told: nothing in the first steps, then all of k."""

    def __init__(self, num_resting: int) -> None:
        self._num_left = num_resting

    def choose_first_block(self, row: SpeculatingRow) -> int:
        return 0 if self._num_left else row.k

    def choose(self, rows: Sequence[SpeculatingRow], mean_position: float, num_other_tokens: int) -> list[int]:
        self._num_left = max(0, self._num_left - 1)
        return [0 if self._num_left else row.k for row in rows]


def run(monkeypatch: pytest.MonkeyPatch, prompt: list[int], num_resting: int, num_tokens: int) -> Outputs:
    built = engine(adaptive_speculation=True, enable_prefix_caching=False, max_num_seqs=2, max_model_len=512)
    speculation, script = built.core.scheduler.speculation, Script(num_resting)
    assert isinstance(speculation, AdaptiveSpeculation)
    monkeypatch.setattr(speculation, "choose", script.choose)
    monkeypatch.setattr(speculation, "choose_first_block", script.choose_first_block)
    outputs = Outputs(built)
    outputs.add("a", prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    outputs.finish()
    return outputs


def test_drafts_after_a_pause_are_those_of_a_request_that_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = LLM(draft="").tokenizer.encode(load_prompts(1, ("math",))[0].prompt)
    rested = run(monkeypatch, prompt, NUM_RESTING, NUM_TOKENS)
    tokens = rested.tokens["a"]
    fresh = run(monkeypatch, prompt + tokens[:NUM_RESTING], 0, NUM_TOKENS - NUM_RESTING)
    assert fresh.tokens["a"] == tokens[NUM_RESTING:]
    counts: list[SpecDecodingStats] = [outputs.core.stats().spec_decoding for outputs in (rested, fresh)]
    assert counts[0] == counts[1]
    assert counts[0].num_accepted_tokens > 10
