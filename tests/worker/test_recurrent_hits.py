"""Prefix hits of a target with recurrent layers: a request that starts behind cached blocks has the state behind them
too, and yields the text of one that computed all of it.

The text to compare with is `transformers`'.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from checks.core_state import check_core
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.models.recurrent_state import StatePool
from tests.models.test_family_engines import expected as expected_tokens
from tests.support.scale import SCALE, by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
BLOCK = 4
# Two blocks and more: what is computed behind a hit, and copies that its own blocks have.
MAX_TOKENS = 24 if SCALE >= 4 else 6
SHARED = 8 * BLOCK


@pytest.fixture(scope="module", params=["Qwen3NextForCausalLM", by_night("Qwen3_5ForCausalLM")])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("hybrid")
    own = {"num_experts": 0} if request.param == "Qwen3NextForCausalLM" else {}
    target = make_target(directory / "target", architecture=request.param, **own)
    make_draft(directory / "draft")
    names = {"target_model": str(directory / "target"), "draft_model": str(directory / "draft")}
    settings = {"kv_block_size": BLOCK, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return target, names | settings


def expected(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    return expected_tokens(model, prompt, MAX_TOKENS)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist()


def answer(built: BuiltEngine, *prompts: list[int], stagger: int | None = None) -> tuple[list[list[int]], int]:
    """Answers to prompts, each after `stagger` steps of those before or after their end, and the tokens hit."""
    before = built.core.stats().prefix_cache_hits
    outputs = Outputs(built)
    for index, prompt in enumerate(prompts):
        outputs.add(str(index), prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for _ in range(stagger or 0):
            outputs.step()
        if stagger is None:
            outputs.finish()
    found = outputs.finish()
    return [found[str(index)] for index in range(len(prompts))], built.core.stats().prefix_cache_hits - before


RUNNERS = ("of a CPU", "of a GPU", "of a GPU, not padded")
NUM_COPIES, STAGGERS = (1, 2, 16), (0, 1, 4)
# Few copies with each kind of steps, and each number of steps between; all of them in `make nightly`.
CROWDED_BY_DAY = {(RUNNERS[0], 1, 0), (RUNNERS[1], 2, 1), (RUNNERS[2], 1, 4), (RUNNERS[1], 16, 0)}
CROWDED = [
    each if each in CROWDED_BY_DAY else by_night(*each) for each in itertools.product(RUNNERS, NUM_COPIES, STAGGERS)
]


def built_for(steps: str, **settings: Any) -> BuiltEngine:
    built = engine(**settings)
    return built if steps == "of a CPU" else on_device_runner(built, padded=steps == "of a GPU")


@pytest.mark.parametrize(
    ("steps", "draft"),
    [
        (RUNNERS[0], True),
        by_night(RUNNERS[0], False),
        (RUNNERS[1], True),
        by_night(RUNNERS[1], False),
        by_night(RUNNERS[2], True),
        (RUNNERS[2], False),
    ],
)
def test_a_hit_at_every_block_border_gives_the_text_of_transformers(
    model: tuple[PreTrainedModel, dict[str, Any]], steps: str, draft: bool
) -> None:
    target, settings = model
    built = built_for(steps, **settings | ({} if draft else {"draft_model": ""}), num_state_snapshots=40)
    text = tokens(60, 1)
    # Every fifth length comes to each border in each way that it can.
    for length in range(16, 46, 1 if SCALE >= 4 else 5):
        prompt = [*text[: length - 1], 1 + length]  # of which the one before is no beginning
        wanted = expected(target, prompt)
        assert answer(built, prompt)[0] == [wanted], length
        again, num_hit = answer(built, prompt)
        assert again == [wanted], length
        border = (length - 1) // BLOCK * BLOCK
        assert num_hit == (border if border >= 16 else 0), length


@pytest.mark.parametrize("steps", [*RUNNERS[:2], by_night(RUNNERS[2])])
def test_the_third_prompt_with_a_beginning_starts_behind_it(
    model: tuple[PreTrainedModel, dict[str, Any]], steps: str
) -> None:
    target, settings = model
    built = built_for(steps, **settings)
    shared = tokens(SHARED, 2)
    prompts = [shared + tokens(count, 10 + count) for count in (9, 14, 5, 23)]
    found = [answer(built, prompt) for prompt in prompts]
    assert [texts for texts, _ in found] == [[expected(target, prompt)] for prompt in prompts]
    assert [num_hit for _, num_hit in found] == [0, 0, SHARED, SHARED]


@pytest.mark.parametrize(("steps", "num_copies", "stagger"), CROWDED)
def test_prompts_side_by_side_with_few_copies_and_blocks_give_their_texts(
    model: tuple[PreTrainedModel, dict[str, Any]], steps: str, num_copies: int, stagger: int
) -> None:
    target, settings = model
    built = built_for(steps, **settings | {"num_state_snapshots": num_copies, "max_num_seqs": 2})
    shared, other = tokens(SHARED, 3), tokens(20, 4)
    prompts = [start + tokens(7 + i, 20 + i) for i, start in enumerate([shared, other, shared, shared, other, other])]
    wanted = [expected(target, prompt) for prompt in prompts]
    num_hit = 0
    for _ in range(2):
        found, hits = answer(built, *prompts, stagger=stagger)
        assert found == wanted
        num_hit += hits
    assert num_hit > 0 or num_copies < 16
    check_core(built.core)


@pytest.mark.parametrize("steps", RUNNERS[:2])
def test_requests_that_leave_while_their_copies_are_written_harm_no_other(
    model: tuple[PreTrainedModel, dict[str, Any]], steps: str
) -> None:
    target, settings = model
    built = built_for(steps, **settings, num_state_snapshots=1)
    for seed in range(6 if SCALE >= 4 else 3):  # of which each leaves after another number of steps
        prompt, own = tokens(41, 30 + seed), tokens(37, 50 + seed)
        outputs = Outputs(built)
        outputs.add("gone", prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for _ in range(seed % 3):
            outputs.step()
        outputs.add("own", own, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        built.core.abort(["gone"])
        assert outputs.finish()["own"] == expected(target, own)
        assert answer(built, own, own)[0] == [expected(target, own)] * 2
        assert answer(built, prompt)[0] == [expected(target, prompt)]


def test_hits_are_as_many_with_a_drafter_as_without(model: tuple[PreTrainedModel, dict[str, Any]]) -> None:
    settings = model[1] | {"num_state_snapshots": 16}
    shared = tokens(SHARED, 5)
    prompts = [shared + tokens(6, 60 + i) for i in range(5)] * 2
    hits = [answer(engine(**settings | {"draft_model": draft}), *prompts)[1] for draft in (settings["draft_model"], "")]
    assert hits[0] == hits[1] == 3 * SHARED + 5 * (SHARED + 4)


def test_a_salt_keeps_states_apart(model: tuple[PreTrainedModel, dict[str, Any]]) -> None:
    built = engine(**model[1])
    prompt = tokens(30, 6)
    for number, (salt, num_hit) in enumerate([("", 0), ("a", 0), ("a", 28), ("", 28), ("b", 0)]):
        before = built.core.stats().prefix_cache_hits
        outputs = Outputs(built)
        outputs.add(str(number), prompt, temperature=0.0, max_tokens=4, ignore_eos=True, cache_salt=salt)
        outputs.finish()
        assert built.core.stats().prefix_cache_hits - before == num_hit


def test_a_copy_is_of_the_state_its_convolution_tail_and_its_length() -> None:
    pool = StatePool(torch.randn(2, 5, 3, 4, 4), torch.randn(2, 5, 3, 6), torch.arange(5, dtype=torch.int32))
    before = [tensor.clone() for tensor in pool.tensors]
    pool.copy([(1, 3), (0, 2)])
    for tensor, old in zip(pool.tensors, before, strict=True):
        axis = 0 if tensor.dim() == 1 else 1
        index = torch.tensor([0, 1, 0, 1, 4])
        assert torch.equal(tensor, old.index_select(axis, index))
    pool.copy([])
