"""Engines whose target two processes share: the same text, and an end when one of them is lost."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.models.peers import RankLostError
from dflash_backend.parallel.group import RankGroup
from dflash_backend.parallel.links import BEAT_S, HANG_S, polled_for
from dflash_backend.parallel.local import LocalRanks
from dflash_backend.parallel.target import TensorParallelTarget
from tests.parallel.rank_forks import fork_ranks
from tests.support.batch_invariance import differing, random_prompts, run
from tests.support.quantised import GPTQ, gptq, write
from tests.support.scale import SCALE, by_night, scaled
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_pair, make_target
from tests.support.waiting import eventually
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
PROMPTS = [[5, 6, 7, 8, 9], [3] * 21, [i % 50 + 1 for i in range(70)], [3] * 17 + [8, 4]]
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9})
# For how long a rank that is taken for lost is silent, in place of HANG_S.
SILENT_S = 2.5
SETTINGS: dict[str, Any] = {"kv_block_size": 4, "max_num_batched_tokens": 48, "max_model_len": 128}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"), {"tie_word_embeddings": False})


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forks, but for those of `shared`, which starts before."""
    fork_ranks(monkeypatch)


@pytest.fixture(scope="module")
def shared(pair: dict[str, str]) -> Iterator[BuiltEngine]:
    """An engine of two ranks, for tests that leave it as it was. Its ranks start as those of a server do."""
    built = engine(**pair, **SETTINGS, tensor_parallel_size=2)
    pids = rank_pids(built)
    yield built
    end(built)
    assert not any(lives(pid) for pid in pids)


def group(built: BuiltEngine) -> RankGroup:
    """What holds the other ranks."""
    target = built.runner.model.target
    assert isinstance(target, TensorParallelTarget)
    assert isinstance(target.ranks, RankGroup)
    return target.ranks


def rank_pids(built: BuiltEngine) -> list[int]:
    links = group(built).links
    assert isinstance(links, LocalRanks)
    return [process.pid for process in links.processes]


def end(built: BuiltEngine) -> None:
    group(built)._end()


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def texts(built: BuiltEngine, **sampling: Any) -> list[list[int]]:
    outputs = Outputs(built)
    for index, prompt in enumerate(PROMPTS):
        outputs.add(str(index), prompt, max_tokens=24, ignore_eos=True, **sampling)
        outputs.step()
    return list(outputs.finish().values())


def mixed_texts(
    built: BuiltEngine,
    asked: Sequence[dict[str, Any]],
    prompts: Sequence[list[int]] = PROMPTS,
    max_tokens: int = 24,
) -> list[list[int]]:
    """As `texts`, with each prompt's own sampling."""
    outputs = Outputs(built)
    for index, (prompt, sampling) in enumerate(zip(prompts, asked, strict=True)):
        outputs.add(str(index), prompt, max_tokens=max_tokens, ignore_eos=True, **sampling)
        outputs.step()
    return list(outputs.finish().values())


def in_turn(samplings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A sampling for each prompt."""
    return list(itertools.islice(itertools.cycle(samplings), len(PROMPTS)))


def assert_same_texts(
    shared: BuiltEngine, alone: BuiltEngine, samplings: Sequence[dict[str, Any]], each_alone: bool = SCALE >= 4
) -> None:
    """Of prompts that take turns with the samplings, or of all prompts with each of them."""
    for asked in [[each] * len(PROMPTS) for each in samplings] if each_alone else [in_turn(samplings)]:
        assert mixed_texts(shared, asked) == mixed_texts(alone, asked)


def texts_until_lost(built: BuiltEngine) -> None:
    deadline = time.monotonic() + 3 * HANG_S
    while time.monotonic() < deadline:
        texts(built, temperature=0.0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    ],
)
def test_two_ranks_give_the_text_of_one(pair: dict[str, str], shared: BuiltEngine, sampling: dict[str, Any]) -> None:
    alone = engine(**pair, **SETTINGS)
    before = shared.core.stats().spec_decoding.num_accepted_tokens
    assert texts(shared, **sampling) == texts(alone, **sampling)
    accepted = shared.core.stats().spec_decoding.num_accepted_tokens - before
    assert accepted == alone.core.stats().spec_decoding.num_accepted_tokens
    assert shared.core.stats().prefix_cache_hits > 0


@pytest.mark.nightly
def test_four_ranks_preempt_and_adapt_as_one_does(pair: dict[str, str]) -> None:
    check_four_ranks(pair)


FAMILIES = ("GptOssForCausalLM", "Qwen3_5MoeForCausalLM", "Gemma4ForCausalLM")  # and Qwen3-MoE with four ranks below


@pytest.mark.parametrize("architecture", FAMILIES if SCALE >= 4 else [by_night(FAMILIES[1])])
def test_ranks_share_other_families_and_give_the_text_of_one(tmp_path: Path, architecture: str) -> None:
    models = make_pair(tmp_path, {"architecture": architecture})
    check_two_ranks(models, each_alone=True)


def test_two_ranks_serve_quantised_weights_and_fp8_made_at_load(tmp_path: Path) -> None:
    make_target(tmp_path / "plain", intermediate_size=64)
    make_draft(tmp_path / "draft")
    write(tmp_path / "plain", tmp_path / "gptq", gptq(group=8), GPTQ | {"group_size": 8})
    for target, settings in (("gptq/quantised", {}), ("plain", {"quantization": "fp8"})):
        check_two_ranks({"target_model": str(tmp_path / target), "draft_model": str(tmp_path / "draft"), **settings})


def check_two_ranks(models: dict[str, Any], each_alone: bool = SCALE >= 4) -> None:
    alone, shared = engine(**models, **SETTINGS), engine(**models, **SETTINGS, tensor_parallel_size=2)
    assert_same_texts(shared, alone, SAMPLINGS, each_alone)
    for built in (alone, shared):
        assert built.core.stats().prefix_cache_hits > 0
    end(shared)


def test_four_ranks_with_experts_preempt_and_adapt_as_one_does(tmp_path: Path) -> None:
    models = make_pair(tmp_path, {"architecture": "Qwen3MoeForCausalLM"})
    check_four_ranks(models)


@pytest.mark.nightly
def test_ranks_of_a_hybrid_preempt_copy_states_and_adapt_as_one_does(tmp_path: Path) -> None:
    models = make_pair(tmp_path, {"architecture": "Qwen3NextForCausalLM", "linear_num_key_heads": 4})
    check_four_ranks(models, kv_cache_gb=0.00012, each_alone=True)


@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_ranks_follow_the_steps_of_a_gpu(tmp_path: Path, overlap: bool) -> None:
    """Its layouts, padding and order, on a CPU."""
    models = make_pair(tmp_path, {"architecture": "Qwen3NextForCausalLM"})
    alone, shared = engine(**models, **SETTINGS), engine(**models, **SETTINGS, tensor_parallel_size=2)
    steps = on_device_runner(shared, overlap=overlap)
    assert_same_texts(steps, alone, SAMPLINGS, each_alone=True)  # a state is found from the second time on
    assert steps.core.stats().prefix_cache_hits > 0
    end(shared)


def check_four_ranks(models: dict[str, str], kv_cache_gb: float = 0.00028, each_alone: bool = SCALE >= 4) -> None:
    """In a pool that is too small for all requests."""
    settings = SETTINGS | {"adaptive_speculation": True, "kv_cache_gb": kv_cache_gb, "max_model_len": 100}
    alone, shared = engine(**models, **settings), engine(**models, **settings, tensor_parallel_size=4)
    samplings: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2})
    assert_same_texts(shared, alone, samplings, each_alone)
    # Short prompts, which begin together, and answers that do not fit together, however many tokens are drafted.
    asked, short = in_turn(samplings), [prompt[:6] for prompt in PROMPTS]
    assert mixed_texts(shared, asked, short, 60) == mixed_texts(alone, asked, short, 60)
    assert shared.core.stats().num_preemptions > 0
    end(shared)


def test_logits_of_two_ranks_are_the_same_to_the_bit_in_any_batch(pair: dict[str, str]) -> None:
    """A sum has the order of the ranks, whatever the batch."""
    built = engine(**pair, **SETTINGS, tensor_parallel_size=2, batch_invariant=True, enable_prefix_caching=False)
    prompts = random_prompts(scaled(6, at_least=3), VOCAB_SIZE, longest=90)
    alone = run(built, prompts[:1], "alone", num_speculative_tokens=0)
    together = run(built, prompts, "together")
    assert differing(alone[1], together[1]) == 0
    assert alone[0]["0"] == together[0]["0"]
    end(built)


def test_each_rank_keeps_its_part_of_the_kv(pair: dict[str, str], shared: BuiltEngine) -> None:
    alone = engine(**pair, **SETTINGS)
    own, whole = shared.runner.model.kv, alone.runner.model.kv
    assert own.target[0].data.shape[3] * 2 == whole.target[0].data.shape[3]
    assert own.draft[0].data.shape == whole.draft[0].data.shape


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "has not answered")])
def test_a_rank_that_is_lost_ends_the_engine(
    pair: dict[str, str], number: signal.Signals, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 looks for the other one all this time.
    monkeypatch.setattr("dflash_backend.parallel.local.HANG_S", SILENT_S)
    built = engine(**pair, **SETTINGS, tensor_parallel_size=2)
    texts(built, temperature=0.0)
    (pid,) = rank_pids(built)
    os.kill(pid, number)
    since = time.monotonic()
    with pytest.raises(RankLostError, match=words):
        texts_until_lost(built)
    assert time.monotonic() - since < SILENT_S + 1.5
    eventually(lambda: not lives(pid))
    end(built)


def test_a_rank_leaves_the_stop_of_a_service_manager_to_rank_zero(pair: dict[str, str], shared: BuiltEngine) -> None:
    before = texts(shared, temperature=0.0)
    for pid in rank_pids(shared):
        os.kill(pid, signal.SIGTERM)
    assert texts(shared, temperature=0.0) == before


def test_what_ranks_cannot_do_is_refused_at_the_start(pair: dict[str, str]) -> None:
    config = EngineConfig.from_values({**pair, "device": "cpu", "tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="4 attention heads are no multiple"):
        build_engine(config)


def test_a_rank_that_ends_while_it_starts_is_lost_and_no_fault_of_the_settings(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_backend.parallel.local.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="rank 1 of 2 could not start: it ended"):
        build_engine(EngineConfig.from_values({**pair, "device": "cpu", "tensor_parallel_size": 2}))


def test_a_rank_that_ends_is_told_while_another_one_loads(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nmkdir {tmp_path}/first 2>/dev/null && exec sleep 300\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("dflash_backend.parallel.local.sys.executable", str(program))
    since = time.monotonic()
    with pytest.raises(RuntimeError, match="rank [123] of 4 could not start: it ended"):
        build_engine(EngineConfig.from_values({**pair, "device": "cpu", "tensor_parallel_size": 4}))
    assert time.monotonic() - since < 60


def test_a_rank_that_says_nothing_while_it_starts_is_an_error_and_ended(
    pair: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setattr("dflash_backend.parallel.local.sys.executable", str(program))
    monkeypatch.setattr("dflash_backend.parallel.links.START_SILENCE_S", 1.0)
    with pytest.raises(RuntimeError, match="rank 1 of 2 could not start: it has said nothing for 1 s"):
        build_engine(EngineConfig.from_values({**pair, "device": "cpu", "tensor_parallel_size": 2}))
    assert not lives(int((tmp_path / "pid").read_text()))


def test_a_pause_of_all_is_no_silence_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("dflash_backend.parallel.links.time.monotonic", lambda: now)
    assert polled_for(99.6) == (pytest.approx(0.4), now)
    assert polled_for(40.0) == (2 * BEAT_S, now), "as a container that was paused"
    assert 2 * BEAT_S < SILENT_S
