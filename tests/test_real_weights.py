"""The published acceptance lengths, measured with published weights. Needs a GPU and these environment variables:

- DFLASH_REAL_WEIGHTS_TARGET and DFLASH_REAL_WEIGHTS_DRAFT: Qwen3-8B and its b16 drafter, directories or hub ids;
- DFLASH_REAL_WEIGHTS_SPECULATORS: a speculators DFlash checkpoint whose target can be found from its own config, and
  DFLASH_REAL_WEIGHTS_SPECULATORS_LENGTH: the acceptance length on GSM8K that its authors report;
- DFLASH_REAL_WEIGHTS_GSM8K, _HUMANEVAL, _MT_BENCH: files with the published rows, where the hub cannot be reached;
- DFLASH_REAL_WEIGHTS_LIMIT: how many rows of GSM8K are run (default 256); of the other two all are.

Asserted are acceptance lengths, greedy and with thinking off: of the published pair on three sets, at least
`tests.published.least_acceptance_length`; of the speculators checkpoint on GSM8K, 95 % of what its authors report. Its
config and weights do not say what that is, so that without the variable the bound is only that half a draft token
stands in a step: it tells a drafter that drafts from one that reads nothing sensible, and would pass a layer index that
is off by one. Accuracy is printed and not asserted; the programs of HumanEval are not run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_backend import LLM
from dflash_backend.evaluation import Evaluation, Sampling, evaluate
from dflash_backend.evaluation.datasets import Source, load_questions
from dflash_backend.evaluation.engine import EngineAnswerer
from dflash_backend.evaluation.hub_sets import HUB_SETS
from dflash_backend.evaluation.report import tables
from tests.published import QWEN3_8B_B16, TOLERANCE, least_acceptance_length

PREFIX = "DFLASH_REAL_WEIGHTS_"
LEAST_LENGTH_OF_ANY_DRAFTER = 1.5
KV_CACHE_GB = 8  # of each engine: both are in memory at the same time

pytestmark = pytest.mark.real_weights


def given(name: str) -> str:
    """The value of a variable; skips the test where it is not set."""
    value = os.environ.get(PREFIX + name)
    if not value:
        pytest.skip(f"{PREFIX}{name} is not set")
    return value


def measure(llm: LLM, dataset: str) -> Evaluation:
    """Greedy answers to a published set; prints the tables."""
    file = os.environ.get(PREFIX + dataset.upper().replace("-", "_"))
    limit = int(os.environ.get(PREFIX + "LIMIT", "256")) if dataset == "gsm8k" else None
    source = Source(dataset, Path(file) if file else None, HUB_SETS[dataset])
    found = evaluate(EngineAnswerer(llm), load_questions([source], limit), Sampling())
    print(tables(found, {"engine": llm.engine.ready.description, "dataset": dataset, "limit": limit}))
    return found


@pytest.fixture(scope="module")
def published_pair() -> LLM:
    return LLM(given("TARGET"), given("DRAFT"), kv_cache_gb=KV_CACHE_GB)


@pytest.mark.parametrize("dataset", QWEN3_8B_B16)
def test_the_published_pair_reaches_the_published_acceptance_length(published_pair: LLM, dataset: str) -> None:
    counts = measure(published_pair, dataset).overall.counts
    assert counts.acceptance_length >= least_acceptance_length(dataset)


def test_a_speculators_checkpoint_given_alone_accepts_what_its_authors_report() -> None:
    llm = LLM(given("SPECULATORS"), kv_cache_gb=KV_CACHE_GB)
    assert llm.engine.ready.num_speculative_tokens > 0
    reported = os.environ.get(PREFIX + "SPECULATORS_LENGTH")
    least = float(reported) * TOLERANCE if reported else LEAST_LENGTH_OF_ANY_DRAFTER
    assert measure(llm, "gsm8k").overall.counts.acceptance_length >= least
