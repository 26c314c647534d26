"""LOSSLESS with the steps of a GPU: they yield the tokens of a CPU's steps, with references and with our kernels.

Overlap, padded decode steps, ragged prefill steps, preemptions and prefix hits change speed only. The write guard is on
throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import asset_path
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.messages import FinishReason
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.worker.graphs import capture_shapes
from load_tests.prompts import load_prompts
from tests.support.tiny_models import GEMMA4_EXPERTS, make_pair
from tests.worker.engines import Outputs, engine, on_device_runner, outputs_of, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")
# A padded step looks at all the positions that a request may have.
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 6}
MAX_TOKENS = 28

# What each request asks for beside its prompt: greedy and sampled ones, drafts of their own or none, ends of all kinds.
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.0, "k": 3},
    {"temperature": 0.0, "k": 0},
    {"temperature": 2.5, "seed": 2, "top_p": 0.6},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.7, "seed": 3, "k": 2, "max_tokens": 9},
    {"temperature": 0.0, "max_tokens": 17},
    {"temperature": 2.5, "seed": 4, "top_k": 5},
    {"temperature": 0.0, "ignore_eos": False},
    {"temperature": 2.5, "seed": 5, "min_p": 0.1},
    {"temperature": 0.0},
]
FILTERS = ("top_p", "top_k", "min_p")


def prompts_of_many_lengths() -> list[list[int]]:
    """Twelve prompts for the demo target, of which the last begins as the first does."""
    tokenizer = Tokenizer.load(asset_path("demo", "pair", "target"))
    encoded = [tokenizer.encode(row.prompt) for row in load_prompts(11)]
    mixed = [tokens[: 3 + 9 * i] if i % 3 == 2 else tokens for i, tokens in enumerate(encoded)]
    return [*mixed, encoded[0] + encoded[1]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of_many_lengths()


@dataclass(frozen=True)
class Result:
    """What the requests yielded, and how the drafts fared on the way."""

    tokens: dict[str, list[int]]
    reasons: dict[str, FinishReason]
    num_drafted: int
    num_accepted: int


def run(built: BuiltEngine, prompts: list[list[int]], requests: list[dict[str, Any]] = REQUESTS) -> Result:
    outputs = outputs_of(built, prompts, [{"max_tokens": MAX_TOKENS, **asked} for asked in requests])
    drafting = built.core.stats().spec_decoding
    return Result(outputs.tokens, outputs.reasons, drafting.num_draft_tokens, drafting.num_accepted_tokens)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> Result:
    return run(engine(**SETTINGS), prompts)


# Blocks of 16 tokens; two long requests do not fit the small pool together.
SMALL_POOL = {"kv_cache_gb": 0.0008}


# Settings, and options of `on_device_runner`.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlap": ({}, {}),
    "no overlap": ({}, {"overlap": False}),
    "ragged steps alone": ({}, {"padded": False}),
    "small pool": (SMALL_POOL, {}),
    "small chunks": ({"max_num_batched_tokens": 56, "enable_prefix_caching": False}, {}),
}


@pytest.mark.parametrize(("settings", "options"), WAYS.values(), ids=WAYS)
def test_the_steps_of_a_gpu_yield_the_tokens_of_a_cpu(
    settings: dict[str, Any],
    options: dict[str, Any],
    prompts: list[list[int]],
    expected: Result,
) -> None:
    """And the very drafts, whose acceptance shows what the drafter saw."""
    built = on_device_runner(engine(**{**SETTINGS, **settings}), **options)
    assert run(built, prompts) == expected
    assert expected.num_drafted > expected.num_accepted > 100, "some drafts must be rejected, or nothing is shown"
    if settings is SMALL_POOL:
        assert built.core.stats().num_preemptions > 0


FORMS: dict[str, dict[str, Any] | None] = {"on a CPU": None, "any number": {}, "shapes": {"shapes": capture_shapes(15)}}


def check_adaptive_texts(
    built: BuiltEngine, options: dict[str, Any] | None, prompts: list[list[int]], expected: Result
) -> None:
    """Run an engine that drafts as many tokens as pay; `options` of `on_device_runner`, None on a CPU."""
    if options is not None:
        built = on_device_runner(built, **options)
    found = run(built, prompts)
    assert (found.tokens, found.reasons) == (expected.tokens, expected.reasons)
    stats = built.core.stats().speculation
    assert len({count for count in stats.num_draft_tokens_per_pos if count}) > 1, "blocks of several lengths"


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_number_of_drafts_that_follows_the_load_changes_no_token(
    options: dict[str, Any] | None, prompts: list[list[int]], expected: Result
) -> None:
    check_adaptive_texts(engine(**SETTINGS, adaptive_speculation=True), options, prompts, expected)


def test_each_filter_of_these_requests_changes_what_is_drawn(prompts: list[list[int]], expected: Result) -> None:
    """Else a runner that ignores top-k, top-p or min-p would yield the same tokens above."""
    unfiltered = [{name: value for name, value in asked.items() if name not in FILTERS} for asked in REQUESTS]
    found = run(engine(**SETTINGS), prompts, unfiltered).tokens
    assert {name for name in found if found[name] != expected.tokens[name]} == {
        str(i) for i, asked in enumerate(REQUESTS) if asked.keys() & set(FILTERS)
    }
    assert {name for asked in REQUESTS for name in asked if name in FILTERS} == set(FILTERS)


def test_a_prefix_hit_restores_the_drafters_context_too(prompts: list[list[int]]) -> None:
    built = on_device_runner(engine(**SETTINGS))
    outputs = Outputs(built)
    accepted = []
    for name in ("miss", "hit"):
        before = built.core.stats().spec_decoding.num_accepted_tokens
        outputs.add(name, prompts[0], temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs.finish()
        accepted.append(built.core.stats().spec_decoding.num_accepted_tokens - before)
    assert outputs.tokens["hit"] == outputs.tokens["miss"]
    assert built.core.stats().prefix_cache_hits > 0
    assert accepted[0] == accepted[1]


def test_processed_logits_and_logprobs_are_those_of_a_cpu(prompts: list[list[int]]) -> None:
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
        {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": (10, 12, 13)},
        {"temperature": 0.8, "seed": 8, "logit_bias": {5: 4.0, 300: -8.0}, "logprobs": 0},
        {"temperature": 0.0},
    ]
    sampling = [{"max_tokens": 20, **asked} for asked in requests]
    results = [
        outputs_of(built, prompts[: len(requests)], sampling)
        for built in (engine(**SETTINGS), on_device_runner(engine(**SETTINGS)))
    ]
    assert results[1].tokens == results[0].tokens
    assert results[1].reasons == results[0].reasons
    assert results[1].logprobs.keys() == results[0].logprobs.keys() == {"0", "3"}
    for name, entries in results[0].logprobs.items():
        for ours, theirs in zip(results[1].logprobs[name], entries, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.ranks == theirs.ranks
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3ForCausalLM", {}),
        ("GptOssForCausalLM", {}),
        ("Gemma4ForCausalLM", {"layer_types": ["sliding_attention", "full_attention"]} | GEMMA4_EXPERTS),
    ],
)
def test_kernels_throughout_yield_the_same_tokens(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    """Two requests on a model of two layers and a drafter of one: a prefill step and three padded decode steps."""
    layers = {"target_layer_ids": [0, 1], "mask_token_id": 96}
    target = {"architecture": architecture, "num_hidden_layers": 2, **changes}
    models = make_pair(tmp_path, target, block_size=3, num_target_layers=2, dflash_config=layers)
    settings = {**models, "kv_block_size": 4, "max_model_len": 24, "max_num_seqs": 2}
    sampling = [{"temperature": 0.0, "max_tokens": 4}, {"temperature": 0.8, "seed": 3, "max_tokens": 4}]
    expected, found = (
        run(built, [[1, 2, 3, 4], [9, 8]], sampling)
        for built in (engine(**settings), triton_engine(**settings, kv_write_guard=False))
    )
    assert found == expected


@pytest.mark.slow
def test_kernels_throughout_are_lossless_on_the_demo_pair() -> None:
    """Two short prompts, with most drafts accepted. Slow under the interpreter, which takes milliseconds for what a GPU
    does in nanoseconds."""
    tokenizer = Tokenizer.load(asset_path("demo", "pair", "target"))
    short = sorted((tokenizer.encode(row.prompt) for row in load_prompts(100)), key=len)[1:3]
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "num_speculative_tokens": 5}
    sampling = [{"temperature": 0.0, "max_tokens": 10}] * 2
    expected, found = (run(built, short, sampling) for built in (engine(**settings), triton_engine(**settings)))
    assert found == expected
    assert found.num_accepted > 8
