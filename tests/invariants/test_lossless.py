"""LOSSLESS on the demo pair: every way to run gives the tokens of `transformers`, and sampling its distribution.

The measurements are those of `checks.lossless` and `checks.sampling`, so that what is run by hand and what
is tested are the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import ties
from benchmarks.measure import Measurement
from checks.lossless import Case, cases, reference, run_case
from checks.sampling import DRAFT_TEMPERATURE_RATIOS, fit
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.worker.step_ops import CpuStepOps
from dflash_kernels.sample import sample_reference
from load_tests.prompts import load_prompts
from tests.gpu.test_engine import logits_in_float32
from tests.support.scale import SCALE, by_night, scaled

pytestmark = pytest.mark.slow
NUM_PROMPTS = scaled(24 if SCALE >= 4 else 16, at_least=16)
FEW_PROMPTS = 8
MAX_TOKENS = 96
NUM_SAMPLES = scaled(8_000 if SCALE >= 4 else 2_400, at_least=2_400)
# However requests are run, acceptance is about that of one at a time, 12.9.
LEAST_ACCEPTANCE_LENGTH = 12.4
# Answers quote little of their questions.
LEAST_OF_NGRAMS = 1.2


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = LLM(draft="").tokenizer
    return [tokenizer.encode(row.prompt) for row in load_prompts(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Measurement:
    return reference(prompts, MAX_TOKENS)


# Each of these differs in one setting from one that is run.
LEFT = ("DFlash, one stream", "DFlash, 32 streams", "DFlash, small KV pool", "DFlash, k = 4", "n-grams, one stream")
CASES = [by_night(case) if case.name in LEFT else case for case in cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_to_run_gives_the_tokens_of_transformers(
    case: Case, prompts: list[list[int]], expected: Measurement
) -> None:
    # One after the other takes longest.
    chosen = prompts[:FEW_PROMPTS] if (case.streams == 1 or case.name == "k = 0") and SCALE < 4 else prompts
    result = run_case(case, chosen, expected, MAX_TOKENS)
    print(result)
    assert result.num_equal == len(chosen)
    if "small KV pool" in case.name:
        assert result.num_preemptions > 0
    if "n-grams" in case.name:
        assert result.acceptance_length is not None
        assert result.acceptance_length >= LEAST_OF_NGRAMS
    elif result.acceptance_length is not None and case.settings.keys().isdisjoint(
        {"num_speculative_tokens", "adaptive_speculation"}
    ):
        assert result.acceptance_length >= LEAST_ACCEPTANCE_LENGTH


def test_in_bfloat16_drafts_change_nothing_but_at_ties(prompts: list[list[int]]) -> None:
    plain, drafted = (
        LLM(dtype="bfloat16", draft=draft, adaptive_speculation=False).generate(
            list(prompts), max_tokens=MAX_TOKENS, temperature=0
        )
        for draft in ("", "auto")
    )
    logits = logits_in_float32(asset_path("demo", "pair", "target"))
    found = [
        ties.parting(index, ids, one.token_ids, other.token_ids, logits)
        for index, (ids, one, other) in enumerate(zip(prompts, plain, drafted, strict=True))
    ]
    partings = [entry for entry in found if entry is not None]
    print(ties.describe(partings, len(prompts)))
    assert [entry for entry in partings if not entry.is_tie] == []
    assert len(partings) <= NUM_PROMPTS // 4
    counts = SpecDecodingStats.total(output.stats.spec_decoding for output in drafted)
    assert counts.acceptance_length >= LEAST_ACCEPTANCE_LENGTH


@pytest.mark.parametrize("ratio", DRAFT_TEMPERATURE_RATIOS if SCALE >= 4 else DRAFT_TEMPERATURE_RATIOS[-1:])
def test_the_first_three_sampled_tokens_have_the_targets_distribution(ratio: float) -> None:
    result = fit(ratio, NUM_SAMPLES)
    print(result)
    assert result.num_bins >= 20
    assert result.p_value > 0.01


def test_the_distribution_is_wrong_when_all_positions_have_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail, with half of its samples even."""

    def same_noise(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, *rest: Any) -> torch.Tensor:
        return sample_reference(logits, temperature, seeds, torch.zeros_like(seeds), *rest[1:])

    monkeypatch.setattr(CpuStepOps, "_sample", staticmethod(same_noise))
    assert fit(0.0, NUM_SAMPLES // 2).p_value < 1e-4
