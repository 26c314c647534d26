"""The demo pair with quantised weights, through the engine: lossless against itself without a drafter, about as
accurate, and its drafts about as often accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checks.acceptance import held_out, measure
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.evaluation import Evaluation
from load_tests.prompts import load_prompts
from tests.oracle.compressed_tensors_library import config, library
from tests.support.quantised import FP8_BLOCK, fp8_block, write
from tests.support.scale import SCALE, by_night

INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
TARGET, DRAFT = asset_path("demo", "pair", "target"), asset_path("demo", "pair", "draft")
NUM_PROMPTS, NUM_TOKENS, PER_SET = 10, 48, 25 if SCALE >= 4 else 15
# What quantised weights may cost.
LEAST_ACCURACY, LEAST_ACCEPTANCE = 0.95, 0.9


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target in FP8 blocks and in packed INT4, and the drafter in FP8."""
    root = tmp_path_factory.mktemp("quantised")
    return {
        "fp8": write(TARGET, root / "fp8", fp8_block(), FP8_BLOCK).quantised,
        "int4": write(TARGET, root / "int4", library("pack-quantized", INT4), config("pack-quantized", INT4)).quantised,
        "drafter": write(DRAFT, root / "drafter", fp8_block(), FP8_BLOCK).quantised,
    }


def load(target: Path, draft: Path | str, **settings: Any) -> LLM:
    return LLM(target=str(target), draft=str(draft), adaptive_speculation=False, **settings)


GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.8, "seed": 5}


@pytest.mark.parametrize(
    ("scheme", "sampling"),
    [("fp8", SAMPLED), ("int4", GREEDY), by_night("fp8", GREEDY), by_night("int4", SAMPLED)],
    ids=["fp8-sampled", "int4-greedy", "fp8-greedy", "int4-sampled"],
)
def test_drafts_change_no_token_of_a_quantised_target(
    quantised: dict[str, Path], scheme: str, sampling: dict[str, Any]
) -> None:
    prompts = [row.prompt for row in load_prompts(NUM_PROMPTS)]
    settings = {"max_model_len": 512, "kv_cache_gb": 0.25}
    outputs = [
        load(quantised[scheme], draft, **settings).generate(prompts, max_tokens=NUM_TOKENS, **sampling)
        for draft in ("", DRAFT, quantised["drafter"])
    ]
    plain, *drafted = [[output.token_ids for output in of] for of in outputs]
    for of, tokens in zip(outputs[1:], drafted, strict=True):
        assert tokens == plain
        drafts = sum(output.stats.spec_decoding.num_drafts for output in of if output.stats)
        assert sum(map(len, tokens)) > 4 * drafts, "drafts are accepted"


@pytest.mark.parametrize("sampling", [by_night(GREEDY), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_no_token_of_a_target_made_fp8_at_load(sampling: dict[str, Any]) -> None:
    prompts = [row.prompt for row in load_prompts(NUM_PROMPTS)]
    settings = {"max_model_len": 512, "kv_cache_gb": 0.25, "quantization": "fp8"}
    plain, drafted = (
        [
            output.token_ids
            for output in load(TARGET, draft, **settings).generate(prompts, max_tokens=NUM_TOKENS, **sampling)
        ]
        for draft in ("", DRAFT)
    )
    assert drafted == plain


@pytest.fixture(scope="module")
def as_published() -> Evaluation:
    """The pair as it is."""
    return measure(LLM(adaptive_speculation=False), held_out(PER_SET))


def accuracy(found: Evaluation) -> float:
    math = next(group for group in found.categories if group.name == "math")
    assert math.accuracy is not None
    return math.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_quantised_pair_is_about_as_accurate_and_accepts_about_as_much(
    quantised: dict[str, Path], as_published: Evaluation, scheme: str
) -> None:
    found = measure(load(quantised[scheme], quantised["drafter"]), held_out(PER_SET))
    assert_about_as_good(scheme, found, as_published)


@pytest.mark.slow
def test_a_target_made_fp8_at_load_is_about_as_accurate_and_accepts_about_as_much(as_published: Evaluation) -> None:
    found = measure(load(TARGET, DRAFT, quantization="fp8"), held_out(PER_SET))
    assert_about_as_good("fp8 at load", found, as_published)


def assert_about_as_good(scheme: str, found: Evaluation, as_published: Evaluation) -> None:
    acceptance = [evaluation.overall.counts.acceptance_length for evaluation in (found, as_published)]
    print(scheme, accuracy(found), accuracy(as_published), acceptance)
    assert accuracy(found) >= LEAST_ACCURACY * accuracy(as_published)
    assert acceptance[0] >= LEAST_ACCEPTANCE * acceptance[1]
