"""KV that left the device and came back from a tier is that which left: text, accepted drafts of each step and
log-probabilities are those of an engine whose cache never lost it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checks.core_state import check_core
from dflash_backend.config import ConfigError, asset_path
from dflash_backend.core.kv import KVTiers
from dflash_backend.core.moves import DISK, HOST
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.engine.llm import LLM
from dflash_backend.messages import GenerationRequest, SamplingParams, TokenDelta
from dflash_backend.text.tokenizer import Tokenizer
from load_tests.prompts import load_prompts
from tests.drafters.drafts import make_demo_dflash2, make_demo_dspark, make_demo_eagle3
from tests.support.scale import SCALE, by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.support.waiting import eventually
from tests.worker.engines import engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")

BLOCK = 16
# Around the end of a block: the hit ends before the last token.
LENGTHS = (4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1)
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 4}
# By day the first and the last.
ASKED = [(length, each) for length in LENGTHS for each in (GREEDY, SAMPLED)][:: 1 if SCALE >= 4 else 5]
COMMON: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 4, "kv_block_size": BLOCK, "kv_cache_gb": 0.1}


@functools.cache
def text_tokens() -> list[int]:
    """Many tokens of prompts for the demo target."""
    tokenizer = Tokenizer.load(asset_path("demo", "pair", "target"))
    return [token for row in load_prompts(20) for token in tokenizer.encode(row.prompt)]


def tiny(architecture: str, **changes: Any) -> Callable[[Path], dict[str, Any]]:
    def made(folder: Path) -> dict[str, Any]:
        make_target(folder / "target", architecture=architecture, **changes)
        make_draft(folder / "draft")
        models = {"target_model": str(folder / "target"), "draft_model": str(folder / "draft")}
        return {**models, "kv_block_size": 4}  # copies of states are of 4 blocks and more

    return made


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "DFlash": lambda folder: {},
    "DFlash, FP8": lambda folder: {"kv_cache_dtype": "fp8"},
    "DFlash2": lambda folder: {"draft_model": str(make_demo_dflash2(folder))},
    "DSpark": lambda folder: {"draft_model": str(make_demo_dspark(folder))},
    "EAGLE-3": lambda folder: {"draft_model": str(make_demo_eagle3(folder)), "num_speculative_tokens": 5},
    "no drafter": lambda folder: {"draft_model": ""},
    "prompt lookup": lambda folder: {"draft_model": "ngram"},
    "window": tiny("GptOssForCausalLM", sliding_window=9),
    "window, FP8": lambda folder: {"kv_cache_dtype": "fp8"} | tiny("MistralForCausalLM", sliding_window=9)(folder),
    # As many copies of states as prompts and borders.
    "recurrent": lambda folder: {"num_state_snapshots": 16} | tiny("Qwen3NextForCausalLM", num_experts=0)(folder),
}
# By day one case, by way of the disk; the core's tests look at every group of layers.
BY_NIGHT = [by_night(name) for name in CASES]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The settings of a case."""
    return COMMON | CASES[request.param](tmp_path / "models")


def prompts(built: BuiltEngine) -> list[list[int]]:
    """A prompt for each of `ASKED`, all different."""
    if built.pair.target.path == asset_path("demo", "pair", "target"):
        own = text_tokens()
        return [own[80 * i : 80 * i + length] for i, (length, _) in enumerate(ASKED)]
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length, _ in ASKED]


def steps_of(built: BuiltEngine, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[Any], int, dict[str, int]]:
    """What each step of a request yields: tokens, drafts verified, log-probabilities; its tokens found in the cache;
    and those that came from tiers."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **sampling)
    core = built.core
    core.add_request(GenerationRequest("a", prompt, params))
    request = core.scheduler.waiting["a"]
    deltas: list[TokenDelta] = []
    while core.has_unfinished():
        deltas += core.step().deltas
        core.collect_drafts()
        check_core(core)
    assert deltas[-1].stats is not None
    steps = [(delta.token_ids, delta.num_draft_tokens, delta.logprobs) for delta in deltas]
    return steps, deltas[-1].stats.num_cached_tokens, request.num_loaded_tokens


def tiers_of(built: BuiltEngine, always: bool = True) -> KVTiers:
    """An engine's tiers. always: what they have is loaded however quickly it could be computed."""
    tiers = built.core.scheduler.kv.tiers
    assert tiers is not None
    if always:
        tiers._pays = lambda *args: True  # type: ignore[method-assign]
    return tiers


def move_all(built: BuiltEngine) -> None:
    """Let all that is to go to tiers go there."""
    eventually(lambda: built.core.advance_moves() and not built.core.is_moving, "the moves", 10.0)


def lose_device(built: BuiltEngine) -> None:
    """Let all that is to go to tiers go there, and then nothing be left on the device: neither names nor numbers."""
    move_all(built)
    built.core.scheduler.kv.reset_prefix_cache()
    step = built.runner.model
    pools = step.pool.tensors if step.pool is not None else ()
    for tensor in (*(each for group in step.kv.records for each in group), *pools):
        tensor.fill_(3)


def rounds(built: BuiltEngine, between: Callable[[BuiltEngine], None]) -> list[tuple[list[Any], int, dict[str, int]]]:
    """What the prompts yield when they are asked again, after `between`."""
    asked = list(zip(prompts(built), ASKED, strict=True))
    for prompt, (_, sampling) in asked:
        steps_of(built, prompt, sampling)
    between(built)
    return [steps_of(built, prompt, sampling) for prompt, (_, sampling) in asked]


@pytest.mark.parametrize("case", BY_NIGHT, indirect=True)
def test_what_comes_back_from_host_memory_is_what_left(case: dict[str, Any]) -> None:
    kept = rounds(engine(**case), lambda built: None)
    built = engine(**case, kv_host_gb=0.1)
    tiers_of(built)
    found = rounds(built, lose_device)
    assert [each[:2] for each in found] == [each[:2] for each in kept]
    size = built.core.config.block_size
    for (length, _), (_, num_cached, by_tier) in zip(ASKED, found, strict=True):
        assert by_tier == {HOST: num_cached}
        assert num_cached == (length - 1) // size * size
    assert built.core.stats().tiers[HOST].num_hit_tokens == sum(each[1] for each in found)


@pytest.mark.parametrize(
    "case", ["DFlash, FP8", *map(by_night, ("DFlash", "EAGLE-3", "window", "recurrent"))], indirect=True
)
def test_what_comes_back_from_a_disk_after_a_restart_is_what_left(case: dict[str, Any], tmp_path: Path) -> None:
    kept = rounds(engine(**case), lambda built: None)
    settings = {**case, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_gb": 0.1}
    first = engine(**settings)
    for prompt, (_, sampling) in zip(prompts(first), ASKED, strict=True):
        steps_of(first, prompt, sampling)
    move_all(first)
    end(first)
    again = engine(**settings)
    tiers_of(again)
    found = [steps_of(again, *each) for each in zip(prompts(again), [each for _, each in ASKED], strict=True)]
    assert [each[:2] for each in found] == [each[:2] for each in kept]
    assert all(by_tier == {DISK: num_cached} for _, num_cached, by_tier in found)


def end(built: BuiltEngine) -> None:
    """Give up what an engine has of the disk, as its process's end does."""
    mover = built.runner.mover
    assert mover is not None
    mover.close()
    mover._stores[DISK].close()  # type: ignore[attr-defined]


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["DFlash", "EAGLE-3", "window", "recurrent"], indirect=True)
def test_the_steps_of_a_gpu_find_in_tiers_what_those_of_a_cpu_do(case: dict[str, Any]) -> None:
    kept = rounds(on_device_runner(engine(**case)), lambda built: None)
    plain = engine(**case, kv_host_gb=0.1)
    built = on_device_runner(plain)
    tiers_of(built)
    found = rounds(built, lose_device)
    assert [each[:2] for each in found] == [each[:2] for each in kept]
    assert all(by_tier == {HOST: num_cached} for _, num_cached, by_tier in found)


@pytest.mark.nightly
def test_a_working_set_larger_than_the_device_is_found_again(tmp_path: Path) -> None:
    """With evictions for want of space in place of a cache that is emptied; requests run beside loads."""
    texts = text_tokens()
    asked = [texts[40 * i : 40 * i + 100] for i in range(8)]
    llms = [
        LLM(device="cpu", max_model_len=192, max_num_seqs=4, kv_write_guard=True, kv_cache_gb=gib, kv_host_gb=host)
        for gib, host in ((0.1, 0.0), (0.0024, 0.1))
    ]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    wanted, found = ([llm.generate([*asked, *asked], params) for _ in range(2)] for llm in llms)
    assert [[one.token_ids for one in each] for each in found] == [[one.token_ids for one in each] for each in wanted]
    core = llms[1].engine.core
    assert core.scheduler.kv.pool.num_evicted > core.config.num_blocks
    assert core.stats().tiers[HOST].num_hit_tokens > 0
    check_core(core)


def test_a_salted_prefix_stays_salted_in_every_tier(tmp_path: Path) -> None:
    settings = {**COMMON, "kv_host_gb": 0.1}
    built = engine(**settings)
    tiers_of(built)
    prompt = text_tokens()[:70]
    steps_of(built, prompt, GREEDY | {"cache_salt": "mine"})
    lose_device(built)
    assert steps_of(built, prompt, GREEDY | {"cache_salt": "yours"})[1] == 0
    lose_device(built)
    assert steps_of(built, prompt, GREEDY)[1] == 0
    lose_device(built)
    assert steps_of(built, prompt, GREEDY | {"cache_salt": "mine"})[2] == {HOST: 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"num_state_snapshots": 0}, "num_state_snapshots is 0"),
        ({"kv_host_gb": 1e-5}, "setting 'kv_host_gb' is 1e-05, and 32 blocks"),
        ({"kv_host_gb": 0, "kv_disk_path": "/proc/kv"}, "setting 'kv_disk_path' is '/proc/kv': /proc/kv/"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_by_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**{**COMMON, "kv_host_gb": 0.1, **changes})
