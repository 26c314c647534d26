"""Prompt lookup in the engine: lossless in every way to run, for any target, and settings that say what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import SETTINGS, ConfigError, EngineConfig
from dflash_backend.drafters.base import DraftBatch, DraftSampler
from dflash_backend.drafters.ngram.config import (
    DEFAULT_MAX,
    DEFAULT_MAX_BESIDE,
    DEFAULT_MIN,
    DEFAULT_MIN_BESIDE,
    DEFAULT_SPECULATIVE_TOKENS,
    NgramSpec,
)
from dflash_backend.drafters.ngram.drafter import NgramDrafter
from dflash_backend.drafters.resolve import ModelPair, resolve_pair
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.models.ops import LayerOps
from dflash_backend.worker.step_ops import CpuStepOps
from tests.drafters.drafts import edit, make_speculators
from tests.support.tiny_models import make_draft, make_target
from tests.worker.engines import Outputs, engine, on_device_runner, outputs_of, triton_engine

# One beginning, with a phrase that comes back, and ends that differ.
PROMPTS = [[1 + i % 7 for i in range(40)] + [11 + end, 12, 13, 14] * 3 for end in range(5)]
GREEDY = {"temperature": 0.0, "max_tokens": 40}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 40}
MIXED = [{**(SAMPLED if i % 2 else GREEDY), "seed": i} for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "t"
    make_target(directory)
    return str(directory)


def built_engine(target: str, draft: str = "ngram", **settings: Any) -> BuiltEngine:
    return engine(**{"target_model": target, "draft_model": draft, "kv_block_size": 8, "kv_cache_gb": 0.01, **settings})


def outputs(built: BuiltEngine, sampling: Sequence[dict[str, Any]] = MIXED) -> Outputs:
    return outputs_of(built, PROMPTS, sampling)


@pytest.fixture(scope="module")
def expected(target: str) -> dict[str, list[int]]:
    return outputs(built_engine(target, "", enable_prefix_caching=False)).tokens


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 12, "prompt_lookup_min": 1},
    {"prompt_lookup_max": 1},
    {"max_num_batched_tokens": 24},
    {"enable_prefix_caching": False},
    {"kv_cache_gb": 0.0003, "enable_prefix_caching": False},
    {"max_num_seqs": 1},
    {"draft_temperature_ratio": 1.0},
    {"max_model_len": 93},
)


@pytest.mark.parametrize(
    ("settings", "on_device"),
    [
        # By day every other one on each, and by night all.
        pytest.param(
            settings,
            on_device,
            id=f"{'device' if on_device else 'host'}-{settings}",
            marks=[] if (number + on_device) % 2 else pytest.mark.nightly,
        )
        for on_device in (False, True)
        for number, settings in enumerate(WAYS)
    ],
)
def test_the_text_is_that_of_the_target_alone(
    target: str, expected: dict[str, list[int]], settings: dict[str, Any], on_device: bool
) -> None:
    """As a CPU serves, and with the padded, overlapping steps of a GPU."""
    built = built_engine(target, **settings)
    found = outputs(on_device_runner(built) if on_device else built)
    longest = built.core.config.max_model_len
    cut = {name: tokens[: longest - len(PROMPTS[int(name)])] for name, tokens in expected.items()}
    assert found.tokens == cut
    stats = found.core.stats()
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens
    assert (stats.num_preemptions > 0) == ("kv_cache_gb" in settings)


@pytest.mark.slow
def test_our_kernels_give_it_too(tmp_path: Path) -> None:
    make_target(tmp_path, num_hidden_layers=2)
    settings = {"max_num_seqs": 2, "max_model_len": 96, "num_speculative_tokens": 3, "target_model": str(tmp_path)}
    sampling = [{**own, "max_tokens": 8} for own in MIXED[:2]]
    built = triton_engine(draft_model="ngram", **settings)
    expected = outputs_of(engine(**settings | {"draft_model": "", "num_speculative_tokens": 0}), PROMPTS[:2], sampling)
    assert outputs_of(built, PROMPTS[:2], sampling).tokens == expected.tokens


def test_a_prefix_hit_changes_neither_text_nor_drafts(target: str) -> None:
    """There is no context that a hit could lack: the drafts follow from the tokens."""
    built = built_engine(target)
    counts = []
    for run in range(2):
        found = Outputs(built)
        found.tokens.clear()
        for index, prompt in enumerate(PROMPTS):
            found.add(f"{run}.{index}", prompt, ignore_eos=True, seed=index, **GREEDY)
        before = built.core.stats().spec_decoding
        found.finish()
        counts.append((list(found.tokens.values()), built.core.stats().spec_decoding - before))
    assert built.core.stats().prefix_cache_hits > 0
    assert counts[0] == counts[1]


def test_preemption_changes_no_drafts(target: str) -> None:
    """A request that comes back drafts from the same tokens, so its counts are those of an undisturbed run."""
    whole, small = (
        outputs(built_engine(target, kv_cache_gb=size, enable_prefix_caching=False)) for size in (0.01, 0.0003)
    )
    assert small.core.stats().num_preemptions > 0
    assert whole.core.stats().num_preemptions == 0
    assert small.core.stats().spec_decoding == whole.core.stats().spec_decoding


def test_text_that_repeats_is_accepted_whole(target: str) -> None:
    """A target that repeats a phrase: a bias leaves it two tokens, and what it says of these comes back."""
    built = built_engine(target, num_speculative_tokens=6)
    bias = {5: 100.0}
    found = outputs_of(built, [[5, 5, 5]], [{"temperature": 0.0, "max_tokens": 57, "logit_bias": bias}])
    assert found.tokens["0"] == [5] * 57
    counts = found.core.stats().spec_decoding
    assert counts.acceptance_length == 7.0


def test_requests_may_draft_less_or_nothing(target: str, expected: dict[str, list[int]]) -> None:
    built = on_device_runner(built_engine(target))
    found = Outputs(built)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        found.add(str(index), prompt, k=index, ignore_eos=True, **sampling)
    assert found.finish() == expected


def test_it_has_no_weights_no_kv_and_reserves_nothing_for_queries(target: str) -> None:
    ngram, alone = built_engine(target), built_engine(target, "")
    assert ngram.runner.model.kv.draft == []
    assert isinstance(ngram.runner.model.drafter, NgramDrafter)
    assert ngram.core.config.num_blocks == alone.core.config.num_blocks
    assert set(ngram.core.config.lookahead) == {0}
    assert ngram.core.config.num_speculative_tokens == DEFAULT_SPECULATIVE_TOKENS
    assert "prompt lookup of n-grams of 2 to 5 tokens (k = 5)" in ngram.ready.description


@pytest.mark.parametrize(("low", "high", "drafts"), [(1, 1, [6, 1]), (2, 5, [4, 2]), (2, 2, [5, 3]), (4, 5, [3, 3])])
def test_it_drafts_what_followed_the_n_grams_of_its_bounds(low: int, high: int, drafts: list[int]) -> None:
    text = [1, 2, 3, 4, 2, 3, 5, 3, 6, 1, 2, 3]
    batch = DraftBatch(
        torch.tensor([[0] * len(text), text]),
        computed=torch.tensor([0, len(text) - 1], dtype=torch.int32),
        req_idx=torch.tensor([1], dtype=torch.int32),
        num_drafts=torch.tensor([2], dtype=torch.int32),
        k=2,
    )
    drafter = NgramDrafter(NgramSpec(num_speculative_tokens=2, min_ngram=low, max_ngram=high), LayerOps())
    assert drafter.propose(batch, DraftSampler(CpuStepOps())).token_ids.tolist() == [drafts]


def resolve(**settings: Any) -> ModelPair:
    return resolve_pair(EngineConfig.from_values({name: str(value) for name, value in settings.items()}))


def lengths(pair: ModelPair) -> tuple[int, int, int]:
    """The least and the greatest n, and k."""
    assert isinstance(pair.draft, NgramSpec)
    return pair.draft.min_ngram, pair.draft.max_ngram, pair.num_speculative_tokens


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (DEFAULT_MIN, DEFAULT_MAX, DEFAULT_SPECULATIVE_TOKENS)),
        ({"prompt_lookup_max": 3, "num_speculative_tokens": 9}, (2, 3, 9)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3, 5)),
        # The one that is set wins over the default of the other.
        ({"prompt_lookup_max": 1}, (1, 1, 5)),
        ({"prompt_lookup_min": 8}, (8, 8, 5)),
    ],
)
def test_settings_say_which_n_grams_are_looked_up(
    target: str, settings: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert lengths(resolve(target_model=target, draft_model="ngram", **settings)) == expected


def test_the_settings_page_has_the_defaults() -> None:
    help_of = {setting.name: setting.help for setting in SETTINGS}
    assert f"auto: {DEFAULT_MAX}, beside a drafter" in help_of["prompt_lookup_max"]
    assert help_of["prompt_lookup_max"].endswith(f"with prompt_lookup_min {DEFAULT_MAX_BESIDE}")
    assert f"auto: {DEFAULT_MIN}. Beside a drafter" in help_of["prompt_lookup_min"]
    assert help_of["prompt_lookup_min"].endswith(f"with prompt_lookup_max {DEFAULT_MIN_BESIDE}")
    assert f"{DEFAULT_SPECULATIVE_TOKENS} with draft_model=ngram" in help_of["num_speculative_tokens"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_lookup_min": 6, "prompt_lookup_max": 5}, "'prompt_lookup_min' is 6 and 'prompt_lookup_max' is 5"),
        ({"prompt_lookup_min": 0}, "'prompt_lookup_min' has the value '0'.*from 1 to 64"),
        ({"prompt_lookup_max": 65}, "'prompt_lookup_max' has the value '65'.*from 1 to 64"),
        ({"draft_revision": "v1"}, "'draft_revision' is 'v1' and draft_model is ngram, which has no checkpoint"),
        (
            {"draft_model": "", "prompt_lookup_max": 4},
            "'prompt_lookup_max' is 4, and no drafter drafts; set draft_model",
        ),
        (
            {"draft_model": "auto", "prompt_lookup_min": 2},
            "draft_model=ngram, which needs none, or a drafter, or leave",
        ),
        ({"ngram_prompt_lookup_max": 4}, "here that is 'prompt_lookup_max'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(target: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**{"target_model": target, "draft_model": "ngram"} | settings)


def test_no_drafts_are_no_drafter(target: str) -> None:
    assert resolve(target_model=target, draft_model="ngram", num_speculative_tokens=0).draft is None


def test_a_directory_called_ngram_is_reached_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path / "t")
    make_draft(tmp_path / "ngram")
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve(target_model="t", draft_model="ngram").draft, NgramSpec)
    pair = resolve(target_model="t", draft_model="./ngram")
    assert pair.draft_model is not None
    assert pair.draft_model.path == Path("ngram")


def test_in_place_of_a_drafter_that_names_its_target_it_drafts_for_that_target(tmp_path: Path) -> None:
    make_target(tmp_path / "t")
    make_speculators(tmp_path / "s")
    verifier = {"verifier": {"name_or_path": "../t"}}
    edit(tmp_path / "s" / "config.json", lambda data: data["speculators_config"].update(verifier))
    pair = resolve(target_model=tmp_path / "s", draft_model="ngram")
    assert pair.target.path == tmp_path / "t"
    assert isinstance(pair.draft, NgramSpec)


def test_without_a_target_it_drafts_for_the_demo_target() -> None:
    pair = resolve(draft_model="ngram")
    assert pair.target.path.parts[-3:] == ("demo", "pair", "target")
    assert isinstance(pair.draft, NgramSpec)
