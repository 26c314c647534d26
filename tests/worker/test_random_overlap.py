"""Random traffic with steps in flight yields what the engine without overlap yields: tokens and finish reasons.

13 workloads in `make test`, 1,000 in `make nightly`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from checks.core_state import check_core
from checks.lossless import pool_of
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.worker.graphs import capture_shapes
from tests.support.scale import SCALE, scaled
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
K = 7
NUM_WORKLOADS = 25 if SCALE >= 4 else 13
LONGEST_PROMPT, LONGEST_OUTPUT = 14, 18
# Rows and tokens of steps with prompts.
MIXED = [(2, 16), (3, 24), (4, 48), (6, 64)]


@dataclass(frozen=True)
class Request:
    """A request, and the step before which it comes."""

    step: int
    name: str
    prompt: list[int]
    k: int | None
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Settings of an engine, how a GPU's steps are made of it, and its requests."""

    settings: dict[str, Any]
    options: dict[str, Any]
    requests: list[Request] = field(default_factory=list)


def workload(seed: int) -> Workload:
    """Short and long requests, more than run at once, with every parameter that changes their logits."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "kv_block_size": rng.choice([2, 4, 16]),
        "max_model_len": rng.choice([24, 64]),
        "max_num_seqs": rng.choice([2, 4, 6]),
        "kv_write_guard": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        settings["max_num_batched_tokens"] = rng.choice([16, 24, 48])
    if rng.random() < 0.3:
        settings["enable_prefix_caching"] = False
    if rng.random() < 0.3:
        settings["adaptive_speculation"] = True
    if rng.random() < 0.2:
        settings["draft_model"] = "ngram"
        settings["num_speculative_tokens"] = K
    options: dict[str, Any] = {"padded": rng.random() < 0.8}
    if settings.get("adaptive_speculation") and options["padded"]:
        options["shapes"] = capture_shapes(K)
    if options["padded"] and rng.random() < 0.7:
        most = settings.get("max_num_batched_tokens", MIXED[-1][1])
        options["mixed"] = [(num_rows, num_tokens) for num_rows, num_tokens in MIXED if num_tokens <= most]
    requests = [_request(rng, index, settings["max_model_len"]) for index in range(rng.randint(2, 8))]
    return Workload(settings, options, requests)


def _request(rng: random.Random, index: int, max_model_len: int) -> Request:
    prompt_len, max_tokens = rng.randint(1, LONGEST_PROMPT), rng.randint(1, LONGEST_OUTPUT)
    max_tokens = min(max_tokens, max_model_len - prompt_len)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "ignore_eos": rng.random() < 0.6,
        "temperature": rng.choice([0.0, 0.0, 0.8]),
        "seed": rng.randrange(100),
    }
    for name, value, share in (
        ("logprobs", rng.choice([0, 2]), 0.15),
        ("prompt_logprobs", 1, 0.1),
        ("repetition_penalty", 1.3, 0.1),
        ("frequency_penalty", 0.4, 0.05),
        ("min_tokens", min(max_tokens, rng.randint(1, 5)), 0.1),
        ("logit_bias", {7: 3.0}, 0.1),
        ("allowed_token_ids", (5, 6, 7, 8, 9), 0.05),
        ("bad_words_token_ids", ((5, 6), (7,)), 0.05),
        ("top_p", 0.8, 0.15),
        ("top_k", 3, 0.1),
        ("min_p", 0.05, 0.05),
    ):
        if rng.random() < share:
            sampling[name] = value
    shared = [5, 6, 7, 8] * 4
    prompt = shared[:prompt_len] if rng.random() < 0.5 else [rng.randrange(4, 60) for _ in range(prompt_len)]
    return Request(rng.choice([0, 0, 1, 2, 5]), f"r{index}", prompt, rng.choice([None, None, None, 0, 1, 3]), sampling)


def small_pool(settings: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A pool of blocks for little more than one request of the greatest length, so that requests are preempted."""
    longest = settings["max_model_len"] + K + 1
    num_blocks = -(-longest // settings["kv_block_size"]) + rng.randint(1, 4)
    return {"kv_cache_gb": pool_of(num_blocks, **settings)}


def play(built: BuiltEngine, requests: list[Request]) -> Outputs:
    """Run the requests to their end."""
    outputs = Outputs(built)
    for step in range(1000):
        for request in requests:
            if request.step == step:
                outputs.add(request.name, request.prompt, request.k, **request.sampling)
        if step > 5 and not built.core.has_unfinished():
            break
        outputs.step()
        check_core(built.core)
    return outputs


@pytest.mark.parametrize("seed", range(scaled(NUM_WORKLOADS)))
def test_random_overlapped_workloads_yield_what_the_engine_without_overlap_yields(
    settings: dict[str, Any], seed: int
) -> None:
    work = workload(seed)
    own = settings | work.settings
    rng = random.Random(seed)
    if rng.random() < 0.3:
        own |= small_pool(own, rng)
    expected = play(engine(**own), work.requests)
    overlapped = play(on_device_runner(engine(**own), **work.options), work.requests)
    assert overlapped.tokens == expected.tokens
    assert overlapped.reasons == expected.reasons
    assert expected.reasons.keys() == {request.name for request in work.requests}
