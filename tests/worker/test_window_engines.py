"""Targets whose layers with a window have KV blocks of their own: text is that of `transformers`, however many blocks
were given back, and a hit needs only the blocks that its first query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checks.core_state import check_core
from dflash_backend.core.plan import ScheduledRequest, SchedulerOutput
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.worker.kv_cache import KVWriteError, WriteGuard, bytes_per_block
from dflash_backend.worker.memory import GIB
from tests.models.test_family_engines import MAX_TOKENS, expected
from tests.support.scale import by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import Outputs, engine, on_device_runner, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")
WINDOW, BLOCK = 9, 4
# Layers with a window among others, two shapes of layers, and a window in every layer.
ARCHITECTURES = ("GptOssForCausalLM", "Gemma4ForCausalLM", "MistralForCausalLM")


def prompts() -> list[list[int]]:
    """Six, of which three share a beginning of many windows."""
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 70, 90, 3, 7, 11)]
    return [*ids[:3], ids[1][:60] + ids[3], ids[1] + ids[4], ids[5]]


@dataclass(frozen=True)
class Case:
    """A target with a drafter, and what `transformers` generates for the prompts."""

    architecture: str
    target: Path
    draft: Path
    wanted: list[list[int]]

    def engine(self, with_drafter: bool = True, **settings: Any) -> BuiltEngine:
        few = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "kv_block_size": BLOCK, "max_model_len": 192}
        models = {"target_model": self.target, "draft_model": str(self.draft) if with_drafter else ""}
        built = engine(**models, **few | settings)
        assert 0 < built.core.config.num_window_blocks < built.core.config.num_blocks
        return built


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of an architecture, which is made once."""

    @cache
    def made(architecture: str) -> Case:
        directory = tmp_path_factory.mktemp("windows")
        model = make_target(directory / "target", architecture=architecture, sliding_window=WINDOW)
        make_draft(directory / "draft")
        wanted = [expected(model, prompt) for prompt in prompts()]
        return Case(architecture, directory / "target", directory / "draft", wanted)

    return made


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def generate(built: BuiltEngine, asked: list[list[int]], stagger: int = 8) -> list[list[int]]:
    """The answers to prompts of which each arrives `stagger` steps after the one before."""
    outputs = Outputs(built)
    for index, prompt in enumerate(asked):
        outputs.add(str(index), prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for _ in range(stagger):
            outputs.step()
    found = outputs.finish()
    check_core(built.core)
    return [found[str(index)] for index in range(len(asked))]


@pytest.mark.parametrize(
    ("case", "with_drafter"),
    [
        by_night("GptOssForCausalLM", False),
        ("GptOssForCausalLM", True),
        by_night("Gemma4ForCausalLM", False),
        ("Gemma4ForCausalLM", True),
        ("MistralForCausalLM", False),
        by_night("MistralForCausalLM", True),
    ],
    indirect=["case"],
)
def test_text_is_that_of_transformers_while_blocks_are_given_back(case: Case, with_drafter: bool) -> None:
    built = case.engine(with_drafter)
    assert generate(built, prompts()) == case.wanted
    assert built.core.stats().prefix_cache_hits > 100
    assert generate(on_device_runner(built), prompts()) == case.wanted


# Not Mistral: blocks of the drafter alone take little, so no pool is small that has enough for windows.
@pytest.mark.parametrize("case", [ARCHITECTURES[0], by_night(ARCHITECTURES[1])], indirect=True)
def test_text_is_the_same_after_preemptions(case: Case) -> None:
    two = {"max_num_seqs": 2, "max_model_len": 160}
    built = case.engine(**two)
    draft = built.pair.draft_model
    num_blocks = built.core.config.num_window_blocks + 2
    size = bytes_per_block(built.pair.target.decoder, draft.decoder if draft else None, BLOCK, torch.float32)
    small = case.engine(**two, kv_cache_gb=num_blocks * size / GIB)
    assert generate(small, prompts(), stagger=0) == case.wanted
    assert small.core.stats().num_preemptions > 0


def test_kernels_find_the_blocks_of_each_kind_of_layer(tmp_path: Path) -> None:
    model = make_target(tmp_path, architecture="GptOssForCausalLM", sliding_window=WINDOW)
    settings = {"max_num_batched_tokens": 20, "max_num_seqs": 2, "kv_block_size": 16, "max_model_len": 128}
    built = triton_engine(target_model=tmp_path, draft_model="", **settings)
    assert built.core.config.num_window_blocks > 0
    prompt = prompts()[1][:40]
    outputs = Outputs(built)
    outputs.add("0", prompt, temperature=0.0, max_tokens=3, ignore_eos=True)
    assert outputs.finish()["0"] == expected(model, prompt)[:3]


def test_a_write_to_a_block_of_a_window_that_is_not_the_requests_own_is_noticed() -> None:
    rows = [ScheduledRequest("a", 0, 2, 0, False, 0, [1])]
    own = {"a": frozenset({1})}
    guard = WriteGuard(
        SchedulerOutput(3, rows, writable_block_ids=own, writable_window_block_ids={"a": frozenset({5})}), rows, 4
    )
    row_of_slot = torch.zeros(2, dtype=torch.int32)
    guard.check("verify", row_of_slot, torch.tensor([4, 5]))
    guard.check_windows(row_of_slot, torch.tensor([20, 21]))
    with pytest.raises(KVWriteError, match="layers with a window: request a would write block 1"):
        guard.check_windows(row_of_slot, torch.tensor([4, 5]))
