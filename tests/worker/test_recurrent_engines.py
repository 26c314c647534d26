"""A target with recurrent state yields its own text whatever runs beside, before and after: LOSSLESS and OWN for slots.

The text to compare with is `transformers`', or that of an engine that runs one request after the other without drafts.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.worker.graphs import capture_shapes
from dflash_backend.worker.kv_cache import bytes_per_block
from dflash_backend.worker.memory import GIB
from tests.models.test_family_engines import expected
from tests.support.scale import by_night, scaled
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import Outputs, engine, on_device_runner, triton_engine, unchanged
from tests.worker.test_random_overlap import play, workload

pytestmark = pytest.mark.usefixtures("single_thread")
MAX_TOKENS = 24
NUM_WORKLOADS = 4
MACHINE_GIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


@pytest.fixture(autouse=True)
def no_step_fails(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failed step's requests are computed anew, so their text would not tell."""
    yield
    failed = [record.getMessage() for record in caplog.get_records("call") if "failed" in record.getMessage()]
    assert bool(failed) == ("is_an_error" in request.node.name), failed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A small hybrid and the settings that name it and a drafter."""
    directory = tmp_path_factory.mktemp("hybrid")
    target = make_target(directory / "target", architecture="Qwen3NextForCausalLM", num_experts=0)
    make_draft(directory / "draft")
    names = {"target_model": str(directory / "target"), "draft_model": str(directory / "draft")}
    return target, names | {"kv_block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def settings(model: tuple[PreTrainedModel, dict[str, Any]]) -> dict[str, Any]:
    return model[1]


@pytest.fixture(scope="module")
def texts(model: tuple[PreTrainedModel, dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Prompts, some of them prefilled in chunks and some that repeat themselves, with what `transformers` generates."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 21, 90, 3, 70)]
    prompts.append(prompts[0] * 6)
    return [(prompt, expected(model[0], prompt)) for prompt in prompts]


def small_pool(settings: dict[str, Any], num_blocks: int) -> float:
    """`kv_cache_gb` for that many blocks."""
    pair = engine(**settings).pair
    draft = None if pair.draft_model is None else pair.draft_model.decoder
    return num_blocks * bytes_per_block(pair.target.decoder, draft, settings["kv_block_size"], torch.float32) / GIB


def check(
    built: BuiltEngine, texts: list[tuple[list[int], list[int]]], stagger: int = 3, max_tokens: int = MAX_TOKENS
) -> None:
    """All prompts, one after some steps of those before, give their texts."""
    outputs = Outputs(built)
    for index, (prompt, _) in enumerate(texts):
        outputs.add(str(index), prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for _ in range(stagger):
            outputs.step()
    found = outputs.finish()
    for index, (_, text) in enumerate(texts):
        assert found[str(index)] == text[:max_tokens], index


CASES: dict[str, dict[str, Any]] = {
    "a drafter": {},
    "no drafter": {"draft_model": ""},
    "n-grams": {"draft_model": "ngram", "num_speculative_tokens": 5},
    "adaptive": {"adaptive_speculation": True},
    "two slots": {"max_num_seqs": 2},
    "chunks of few tokens": {"max_num_batched_tokens": 19},
}


STEPS = ("of a CPU", "of a GPU", "of a GPU, not padded")
# `make nightly` has each case with each kind of steps.
BY_DAY = {
    ("of a CPU", "a drafter"),
    ("of a CPU", "n-grams"),
    ("of a CPU", "chunks of few tokens"),
    ("of a GPU", "a drafter"),
    ("of a GPU", "no drafter"),
    ("of a GPU", "adaptive"),
    ("of a GPU", "two slots"),
}


@pytest.mark.parametrize(
    ("steps", "case"),
    [each if each in BY_DAY else by_night(*each) for each in itertools.product(STEPS, CASES)],
)
def test_greedy_text_is_that_of_transformers(
    settings: dict[str, Any], texts: list[tuple[list[int], list[int]]], case: str, steps: str
) -> None:
    built = engine(**settings | CASES[case])
    if steps != "of a CPU":
        shapes = capture_shapes(built.runner.model.state.k) if case == "adaptive" else ()
        built = on_device_runner(built, padded=steps == "of a GPU", shapes=shapes)
    check(built, texts)
    drafts = built.core.stats().spec_decoding
    assert (drafts.num_drafts > 0) == (case != "no drafter")
    if case == "n-grams":  # of which some are accepted and some are not
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_a_preempted_request_is_computed_anew(
    settings: dict[str, Any], texts: list[tuple[list[int], list[int]]], overlap: bool
) -> None:
    built = engine(**settings, kv_cache_gb=small_pool(settings, 40))
    if overlap:
        built = on_device_runner(built)
    check(built, texts, stagger=0)
    assert built.core.stats().num_preemptions > 0


def test_slots_of_aborted_requests_serve_others_while_their_steps_are_in_flight(
    settings: dict[str, Any], texts: list[tuple[list[int], list[int]]]
) -> None:
    built = on_device_runner(engine(**settings, max_num_seqs=2))
    outputs = Outputs(built)
    for index, (prompt, _) in enumerate(texts):
        outputs.add(f"gone {index}", prompt, temperature=0.0, max_tokens=100, ignore_eos=True)
        for _ in range(3):
            outputs.step()
        outputs.add(str(index), prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        built.core.abort([f"gone {index}"])
    found = outputs.finish()
    for index, (_, text) in enumerate(texts):
        assert found[str(index)] == text


@pytest.mark.parametrize("seed", range(scaled(NUM_WORKLOADS)))
def test_random_overlapped_workloads_yield_the_text_of_one_request_after_the_other(
    settings: dict[str, Any], seed: int
) -> None:
    work = workload(seed)
    own = settings | work.settings
    if random.Random(seed).random() < 0.5:
        longest = own["max_model_len"] + 8
        own["kv_cache_gb"] = small_pool(own, -(-longest // own["kv_block_size"]) + 2)
    without = [replace(request, k=0) for request in work.requests]
    alone = play(engine(**own | {"kv_cache_gb": None, "max_num_seqs": 1}), without)
    overlapped = play(on_device_runner(engine(**own), **work.options), work.requests)
    assert overlapped.tokens == alone.tokens
    assert overlapped.reasons == alone.reasons


def test_a_row_elsewhere_than_its_state_ends_is_an_error_under_the_guard(settings: dict[str, Any]) -> None:
    built = engine(**settings)
    outputs = Outputs(built)
    outputs.add("r", [5, 6, 7, 8], temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs.step()
    assert built.runner.model.pool is not None
    built.runner.model.pool.lengths.add_(1)
    with unchanged([built.runner.model.pool.states]):
        outputs.step()
    assert outputs.finish()  # it is computed anew


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_invariant": True}, "batch_invariant"),
        ({"draft_model": "ngram", "num_speculative_tokens": 64}, "at most 63"),
        (
            {"max_num_seqs": 4096, "kv_cache_gb": MACHINE_GIB - 0.01},
            "lower max_num_seqs, num_state_snapshots or kv_cache_gb",
        ),
    ],
)
def test_settings_that_a_hybrid_cannot_be_served_with_are_refused(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**settings | changes)


def test_the_log_says_what_states_take(settings: dict[str, Any]) -> None:
    lines: list[str] = []
    values = {"device": "cpu", **settings, "max_num_seqs": 4, "num_state_snapshots": 7}
    built = build_engine(EngineConfig.from_values(values), lambda message, done: lines.append(message))
    pool = built.runner.model.pool
    assert pool is not None
    assert pool.states.shape[1] == 4 + 7 + 1
    size = sum(tensor.numel() * tensor.element_size() for tensor in (pool.states, pool.tails))
    (line,) = (line for line in lines if "recurrent state" in line)
    assert f"{size / 2**20:.1f} MiB for 4 requests and 7 copies" in line
    assert not any(line.startswith("prefix cache") for line in lines)


@pytest.mark.parametrize(
    ("changes", "num_copies", "is_said"),
    [
        ({"num_state_snapshots": 0}, 0, True),
        ({"enable_prefix_caching": False, "num_state_snapshots": 9}, 0, False),
        ({"max_num_seqs": 2}, 4, False),
        ({"max_num_seqs": 30}, 15, False),
    ],
)
def test_how_many_copies_there_are(
    settings: dict[str, Any], changes: dict[str, Any], num_copies: int, is_said: bool
) -> None:
    lines: list[str] = []
    values = {"device": "cpu", **settings, "max_num_seqs": 4} | changes
    built = build_engine(EngineConfig.from_values(values), lambda message, done: lines.append(message))
    pool = built.runner.model.pool
    assert pool is not None
    assert pool.states.shape[1] == values["max_num_seqs"] + num_copies + 1
    assert built.core.config.enable_prefix_caching == (num_copies > 0)
    assert any(line.startswith("prefix cache: off") for line in lines) == is_said


@pytest.mark.slow
def test_text_with_kernels_throughout_is_that_of_transformers(
    settings: dict[str, Any], texts: list[tuple[list[int], list[int]]]
) -> None:
    built = triton_engine(**settings, max_num_seqs=2)
    check(built, texts[: scaled(1)], max_tokens=scaled(6))
