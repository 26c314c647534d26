"""Prompt lookup beside a drafter's model: a row whose last tokens occurred before drafts what followed then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.base import DraftBatch, Drafts, DraftSampler
from dflash_backend.drafters.ngram.config import DEFAULT_MAX_BESIDE, DEFAULT_MIN_BESIDE, NgramSpec
from dflash_backend.drafters.ngram.drafter import UNSURE_MATCH, NgramDrafter
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.messages import SwapDrafter
from dflash_backend.models.ops import LayerOps
from tests.support.tiny_models import make_draft, make_pair
from tests.worker.engines import Outputs, engine, on_device_runner, outputs_of, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")

# The first ones repeat themselves, and the last does not.
PROMPTS = [[11 + end, 12, 13, 14, 15, 16, 17, 18] * 5 for end in range(3)] + [[3, 5, 9, 2, 30, 7]]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8 if index % 2 else 0.0, "seed": index, "max_tokens": 24} for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(make_pair(tmp_path_factory.mktemp("models")))


def built(pair: dict[str, Any], **settings: Any) -> BuiltEngine:
    return engine(**{**pair, "kv_block_size": 8, "kv_cache_gb": 0.01, "max_num_seqs": 4, **settings})


WAYS: tuple[dict[str, Any], ...] = (
    {"prompt_lookup_min": 1},
    {"prompt_lookup_min": 2, "num_speculative_tokens": 3},
    {"prompt_lookup_max": 8},
    {"prompt_lookup_min": 2, "adaptive_speculation": True},
    {"prompt_lookup_min": 2, "max_num_seqs": 1, "draft_temperature_ratio": 1.0},
)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_the_targets_own(pair: dict[str, Any], way: dict[str, Any]) -> None:
    expected = outputs_of(built(pair | {"draft_model": ""}), PROMPTS, SAMPLING).tokens
    assert outputs_of(built(pair, **way), PROMPTS, SAMPLING).tokens == expected
    assert outputs_of(on_device_runner(built(pair, **way)), PROMPTS, SAMPLING).tokens == expected


def test_rows_that_end_in_a_part_of_their_own_leave_the_others_drafting(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a part drafts nothing, so nothing is said of what its rows looked up. That a row ends is not known before:
    by a stop token."""
    texts = outputs_of(built(pair), PROMPTS, SAMPLING).tokens
    sampling = [
        {**each, "stop_token_ids": [tokens[3 + 4 * index]]}
        for index, (each, tokens) in enumerate(zip(SAMPLING, texts.values(), strict=True))
    ]
    expected = outputs_of(built(pair), PROMPTS, sampling).tokens
    cut = built(pair, prompt_lookup_min=2)
    monkeypatch.setattr(cut.runner.threads, "split", lambda rows, answers: [[row] for row in rows])
    assert outputs_of(cut, PROMPTS, sampling).tokens == expected


def test_kernels_look_up_as_the_reference_does(pair: dict[str, Any]) -> None:
    sizes = {"kv_block_size": 16, "kv_cache_gb": 0.01, "max_num_seqs": 4, "max_model_len": 96}
    own, looked_up = (triton_engine(**pair, **sizes, **more) for more in ({}, {"prompt_lookup_min": 2}))
    sampling = [{**each, "max_tokens": 8} for each in SAMPLING]
    assert outputs_of(looked_up, PROMPTS, sampling).tokens == outputs_of(own, PROMPTS, sampling).tokens


def first_drafts(built: BuiltEngine, prompt: list[int], first_token: int) -> list[int]:
    """What is drafted after a prompt and a first token that is forced."""
    outputs = Outputs(built)
    outputs.add("r", prompt, max_tokens=8, temperature=0.0, allowed_token_ids=[first_token])
    while not outputs.tokens["r"]:
        outputs.step()
    state, index = built.runner.model.state, built.runner.requests.records["r"].index
    return state.tokens[index, len(prompt) + 1 : len(prompt) + 1 + state.k].tolist()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_row_that_repeats_drafts_what_followed_and_others_what_the_model_says(
    pair: dict[str, Any], on_device: bool
) -> None:
    phrase = [11, 12, 13, 14, 15, 16]

    def drafts(prompt: list[int], first_token: int, **settings: Any) -> list[int]:
        each = built(pair, **settings)
        return first_drafts(on_device_runner(each, overlap=False) if on_device else each, prompt, first_token)

    looked_up = drafts(phrase * 4, 11, prompt_lookup_min=4)
    assert looked_up == [*phrase[1:], *phrase, *phrase][: len(looked_up)]
    assert drafts(phrase * 4, 11) != looked_up
    assert drafts(phrase, 11, prompt_lookup_min=4) == drafts(phrase, 11), "one token alone occurred before"
    assert drafts(phrase, 11, prompt_lookup_min=1) == [*phrase[1:], *phrase, *phrase][: len(looked_up)]


def test_steps_that_are_measured_at_the_start_teach_nothing_about_lookup(pair: dict[str, Any]) -> None:
    each = built(pair, prompt_lookup_min=1, adaptive_speculation=True)
    assert each.core.config.measured_steps
    assert each.runner.model.state.lookup_gain is not None
    assert not each.runner.model.state.lookup_gain.any()


class Wrong(NgramDrafter):
    """Says that something matched where nothing did."""

    def propose_matched(self, batch: DraftBatch, wants_confidence: bool) -> tuple[Drafts, torch.Tensor]:
        drafts, _ = super().propose_matched(batch, wants_confidence)
        return drafts, batch.num_drafts


@pytest.mark.parametrize("on_device", [False, True])
def test_blocks_that_were_looked_up_are_counted_and_do_not_judge_the_drafter(
    pair: dict[str, Any], on_device: bool
) -> None:
    """The target repeats its prompt: what is looked up is accepted."""
    each = built(pair, prompt_lookup_min=2, num_speculative_tokens=3)
    each = on_device_runner(each) if on_device else each
    outputs = outputs_of(each, [[11, 12, 13, 14] * 6], [{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}])
    stats = each.core.stats()
    assert len(outputs.tokens["0"]) == 24
    assert 0 < stats.lookup.num_drafts <= stats.spec_decoding.num_drafts
    assert stats.lookup.num_draft_tokens <= stats.spec_decoding.num_draft_tokens
    own = stats.spec_decoding.num_drafts - stats.lookup.num_drafts
    assert each.core._acceptance.total == own


@pytest.mark.parametrize("on_device", [False, True])
def test_a_row_whose_looked_up_drafts_are_worse_verifies_the_models(pair: dict[str, Any], on_device: bool) -> None:
    """The drafter is the target's own answer: it is always right, and lookup, which always proposes, hardly ever."""
    each = built(pair, prompt_lookup_min=2, num_speculative_tokens=3, adaptive_speculation=False)
    assert each.runner.model.lookup is not None
    each.runner.model.lookup = Wrong(each.runner.model.lookup.spec, LayerOps())
    each = on_device_runner(each) if on_device else each
    sampling = [{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}]
    answer = outputs_of(built(pair | {"draft_model": ""}), PROMPTS[3:], sampling).tokens["0"]
    step, prompt = each.runner.model, PROMPTS[3]
    text = torch.tensor([*prompt, *answer, *[0] * 8])

    def right(batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        places = batch.computed[batch.req_idx.clamp(min=0).long()].long()[:, None] + torch.arange(1, 4)
        drafts = text[places.clamp(max=len(text) - 1)]
        return Drafts(drafts if on_device else drafts[:, : int(batch.num_drafts[0])].flatten())

    assert step.drafter is not None
    step.drafter.propose = right  # type: ignore[method-assign]
    assert outputs_of(each, PROMPTS[3:], sampling).tokens["0"] == answer
    stats = each.core.stats()
    assert stats.lookup.num_drafts <= 2
    assert stats.spec_decoding.num_drafts >= 9


def test_how_sure_a_match_is_grows_with_its_length() -> None:
    lookup = NgramDrafter(NgramSpec(num_speculative_tokens=3, min_ngram=2, max_ngram=5), LayerOps())
    tokens = torch.tensor([[1, 2, 9, 1, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [5, 5, 5, 5, 5, 5, 0, 0]])
    computed = torch.tensor([4, 4, 5], dtype=torch.int32)
    rows, asked = torch.arange(3, dtype=torch.int32), torch.tensor([3, 3, 2], dtype=torch.int32)
    drafts, num_drafts = lookup.propose_matched(DraftBatch(tokens, computed, rows, asked, 3), wants_confidence=True)
    assert num_drafts.tolist() == [3, 0, 2]
    assert num_drafts.dtype == torch.int32
    assert drafts.token_ids[0].tolist() == [9, 1, 2]
    assert drafts.confidence is not None
    assert drafts.confidence[[0, 2], 0].tolist() == [2 - UNSURE_MATCH, 5 - UNSURE_MATCH]
    assert lookup.propose_matched(DraftBatch(tokens, computed, rows, asked, 3), False)[0].confidence is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"prompt_lookup_min": 3}, (3, DEFAULT_MAX_BESIDE)),
        ({"prompt_lookup_min": 19}, (19, 19)),
        ({"prompt_lookup_max": 7}, (DEFAULT_MIN_BESIDE, 7)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_min": 3, "num_speculative_tokens": 0}, None),
    ],
)
def test_settings_say_what_is_looked_up(
    pair: dict[str, Any], settings: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    found = resolve_pair(EngineConfig.from_values({**pair, "device": "cpu", **settings}))
    assert (None if found.lookup is None else (found.lookup.min_ngram, found.lookup.max_ngram)) == expected
    assert ("beside prompt lookup of n-grams of" in found.drafting) == (expected is not None)


def test_settings_that_contradict_each_other_are_refused(pair: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'prompt_lookup_min' is 6 and 'prompt_lookup_max' is 5"):
        resolve_pair(EngineConfig.from_values(pair | {"prompt_lookup_min": 6, "prompt_lookup_max": 5}))


def test_another_drafter_keeps_what_is_looked_up(pair: dict[str, Any], tmp_path: Path) -> None:
    make_draft(tmp_path / "other", seed=2)
    each = built(pair, prompt_lookup_min=4)
    assert each.drafters is not None
    each.drafters.load(SwapDrafter(swap_id="1", draft_model=str(tmp_path / "other"))).exchange()
    phrase = [11, 12, 13, 14, 15, 16]
    drafts = first_drafts(each, phrase * 4, 11)
    assert drafts == [*phrase[1:], *phrase, *phrase][: len(drafts)]
    assert each.drafters.drafting.startswith("drafter other (")
    assert each.drafters.drafting.endswith("beside prompt lookup of n-grams of 4 to 16 tokens")
