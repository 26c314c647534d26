"""Requests as short as a health check's, with a step in flight: shorter than a block of drafts, or of one token.

The bounds that a step is planned with are cut where such a request ends, so they are unlike those of any longer one.
`test_random_overlapped_workloads_yield_what_the_engine_without_overlap_yields` mixes them with everything else.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_backend.engine.build import BuiltEngine
from tests.worker.engines import Outputs, engine, on_device_runner, outputs_of

pytestmark = pytest.mark.usefixtures("single_thread")
K = 7
NUM_WORKLOADS = 25


@pytest.mark.parametrize("prompt_len", range(1, K + 1))
def test_a_request_shorter_than_its_drafts_ends_as_it_does_without_overlap(
    settings: dict[str, Any], prompt_len: int
) -> None:
    """Every length of output up to one past a whole block of drafts, all in one engine."""
    lengths = range(1, K + 3)
    sampling = [{"max_tokens": n, "temperature": 0.0} for n in lengths]
    expected, found = (
        outputs_of(built, [[5 + n] * prompt_len for n in lengths], sampling).tokens
        for built in (engine(**settings), on_device_runner(engine(**settings)))
    )
    assert found == expected
    assert [len(output) for output in found.values()] == list(lengths)


def test_min_tokens_of_a_short_request_still_waits_for_what_is_in_flight(settings: dict[str, Any]) -> None:
    """The stop token is hidden for two tokens, though the bounds say that the request has ended."""
    sampling = {"max_tokens": 4, "min_tokens": 2, "stop_token_ids": tuple(range(1, 97)), "temperature": 0.0}
    expected, found = (
        outputs_of(built, [[5] * prompt_len for prompt_len in (1, 2, 3)], [sampling] * 3).tokens
        for built in (engine(**settings), on_device_runner(engine(**settings)))
    )
    assert found == expected
    assert all(len(output) >= 2 for output in found.values())


def _workload(seed: int) -> tuple[dict[str, Any], list[tuple[int, str, list[int], int | None, dict[str, Any]]]]:
    """Settings, and requests with the step that each one comes at."""
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
    requests = []
    for index in range(rng.randint(2, 8)):
        prompt_len, max_tokens = rng.randint(1, 14), rng.randint(1, 18)
        max_tokens = min(max_tokens, settings["max_model_len"] - prompt_len)
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": rng.random() < 0.6,
            "temperature": rng.choice([0.0, 0.0, 0.8]),
            "seed": rng.randrange(100),
        }
        for name, value, share in (
            ("logprobs", rng.choice([0, 2]), 0.15),
            ("repetition_penalty", 1.3, 0.1),
            ("min_tokens", min(max_tokens, rng.randint(1, 5)), 0.1),
            ("logit_bias", {7: 3.0}, 0.1),
            ("top_p", 0.8, 0.15),
            ("top_k", 3, 0.1),
        ):
            if rng.random() < share:
                sampling[name] = value
        shared = [5, 6, 7, 8] * 4
        prompt = shared[:prompt_len] if rng.random() < 0.5 else [rng.randrange(4, 60) for _ in range(prompt_len)]
        k = rng.choice([None, None, None, 0, 1, 3])
        requests.append((rng.choice([0, 0, 1, 2, 5]), f"r{index}", prompt, k, sampling))
    return settings, requests


def _play(built: BuiltEngine, requests: list[tuple[int, str, list[int], int | None, dict[str, Any]]]) -> Outputs:
    outputs = Outputs(built)
    for step in range(1000):
        for at, name, prompt, k, sampling in requests:
            if at == step:
                outputs.add(name, prompt, k, **sampling)
        if step > 5 and not built.core.has_unfinished():
            break
        outputs.step()
        built.core.check_invariants()
    return outputs


@pytest.mark.parametrize("seed", range(NUM_WORKLOADS))
def test_random_overlapped_workloads_yield_what_the_engine_without_overlap_yields(
    settings: dict[str, Any], seed: int
) -> None:
    own, requests = _workload(seed)
    expected = _play(engine(**settings | own), requests)
    overlapped = _play(on_device_runner(engine(**settings | own)), requests)
    assert overlapped.tokens == expected.tokens
    assert overlapped.reasons == expected.reasons
    assert expected.reasons.keys() == {name for _, name, *_ in requests}
