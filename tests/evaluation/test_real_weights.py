"""The published figures, measured with published weights. Needs a GPU and these environment variables:

- DFLASH_REAL_WEIGHTS_TARGET and DFLASH_REAL_WEIGHTS_DRAFT: Qwen3-8B and its b16 drafter, directories or hub ids;
- DFLASH_REAL_WEIGHTS_SPECULATORS: nm-testing/dflash-qwen3-8b-speculators, or a directory that has it; its target is
  found from its own config;
- DFLASH_REAL_WEIGHTS_GSM8K, _GSM8K_TRAIN, _HUMANEVAL, _MT_BENCH: files with the published rows, where the hub cannot be
  reached;
- DFLASH_REAL_WEIGHTS_LIMIT: how many rows of GSM8K are run (default 200); of the other two all are.

Asserted, greedy and with thinking off, is what vLLM's tests of the same weights assert, with their tolerances
(`tests.support.published`): of the published pair, on the first turns of three sets, the mean over requests of the
acceptance length; of the speculators checkpoint, on GSM8K with five examples before each question, accuracy,
acceptance length and the acceptance rates of the first four positions. (vLLM asks the b16 drafter for 16 drafts and the
speculators checkpoint for 8; here it is 15 and 7, as the anchor takes a place of the block.) The programs of HumanEval
are not run.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from dflash_backend import LLM
from dflash_backend.evaluation import Evaluation, Question, Sampling, evaluate
from dflash_backend.evaluation.datasets import Source, load_questions
from dflash_backend.evaluation.engine import EngineAnswerer
from dflash_backend.evaluation.hub_sets import HUB_SETS
from dflash_backend.evaluation.questions import Row, read_rows
from dflash_backend.evaluation.report import tables
from tests.support.published import (
    NUM_EXAMPLES,
    QWEN3_8B_B16,
    QWEN3_8B_SPECULATORS,
    STOP,
    SUBSET,
    defects_of_speculators,
    defects_of_the_pair,
    first_turns,
    with_examples,
)

PREFIX = "DFLASH_REAL_WEIGHTS_"
KV_CACHE_GB = 8  # of each engine: both are in memory at the same time

pytestmark = pytest.mark.real_weights


def given(name: str) -> str:
    """The value of a variable; skips the test where it is not set."""
    value = os.environ.get(PREFIX + name)
    if not value:
        pytest.skip(f"{PREFIX}{name} is not set")
    return value


def limit_of(dataset: str) -> int | None:
    """How many rows of a set are run; None for all."""
    return int(os.environ.get(PREFIX + "LIMIT", SUBSET)) if dataset == "gsm8k" else None


def questions_of(dataset: str) -> list[Question]:
    """The first turns of a published set."""
    file = os.environ.get(PREFIX + dataset.upper().replace("-", "_"))
    source = Source(dataset, Path(file) if file else None, HUB_SETS[dataset])
    return first_turns(load_questions([source], limit_of(dataset)))


def gsm8k_rows(split: str, limit: int | None) -> list[Row]:
    """The first rows of GSM8K as published, from a file or from the hub."""
    file = os.environ.get(PREFIX + ("GSM8K_TRAIN" if split == "train" else "GSM8K"))
    if file:
        return list(islice(read_rows(Path(file)), limit))
    from datasets import load_dataset

    rows = load_dataset("openai/gsm8k", "main", split=split)
    return [Row(data, f"openai/gsm8k, row {number}") for number, data in enumerate(islice(rows, limit), 1)]


def measure(llm: LLM, questions: list[Question], sampling: Sampling) -> Evaluation:
    """Greedy answers; prints the tables."""
    found = evaluate(EngineAnswerer(llm), questions, sampling)
    print(tables(found, {"engine": llm.engine.ready.description, "questions": len(questions)}))
    return found


@pytest.fixture(scope="module")
def published_pair() -> LLM:
    return LLM(given("TARGET"), given("DRAFT"), kv_cache_gb=KV_CACHE_GB, adaptive_speculation=False)


@pytest.mark.parametrize("dataset", QWEN3_8B_B16)
def test_the_published_pair_reaches_the_published_acceptance_length(published_pair: LLM, dataset: str) -> None:
    assert defects_of_the_pair(measure(published_pair, questions_of(dataset), Sampling()), dataset) == []


def test_a_speculators_checkpoint_given_alone_reaches_what_vllm_asserts_of_it() -> None:
    llm = LLM(given("SPECULATORS"), kv_cache_gb=KV_CACHE_GB, adaptive_speculation=False)
    assert llm.engine.ready.num_speculative_tokens > 0
    questions = with_examples(gsm8k_rows("train", NUM_EXAMPLES), gsm8k_rows("test", limit_of("gsm8k")))
    assert defects_of_speculators(measure(llm, questions, Sampling(stop=STOP)), QWEN3_8B_SPECULATORS) == []
