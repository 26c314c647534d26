"""Engines whose ranks have a slice of embedding and head each: the text of one process."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend import LLM
from dflash_backend.attention import AttentionPattern
from dflash_backend.attention.interface import Requirements
from dflash_backend.checkpoints import read_target
from dflash_backend.drafters.base import DraftBatch, Drafts, DraftSampler
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.messages import SwapDrafter
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.parallel import rank
from dflash_backend.parallel.group import vocabulary_bytes
from dflash_backend.parallel.target import TensorParallelTarget
from dflash_backend.parallel.vocabulary import SlicedHead
from tests.drafters.drafts import make_dspark, make_eagle3
from tests.parallel.rank_forks import fork_ranks, over_the_network
from tests.parallel.test_ranks import (
    FAMILIES,
    PROMPTS,
    SETTINGS,
    assert_same_texts,
    end,
    group,
    in_turn,
    mixed_texts,
)
from tests.parallel.test_remote_ranks import RAY
from tests.support.batch_invariance import differing, random_prompts, run
from tests.support.scale import SCALE, by_night
from tests.support.tiny_models import HIDDEN, VOCAB_SIZE, make_draft, make_pair, make_target
from tests.worker.engines import engine, on_device_runner, outputs_of

pytestmark = pytest.mark.usefixtures("single_thread")
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}
FILTERED: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.0, "seed": 5, "min_p": 0.05},
]
# What goes by other paths than `sample`.
SPECIAL: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "logit_bias": {5: 3.0}, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks split any vocabulary."""
    fork_ranks(monkeypatch)
    monkeypatch.setattr("dflash_backend.parallel.group.MIN_SPLIT_BYTES", 0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_pair(tmp_path_factory.mktemp("models"), {"tie_word_embeddings": False})


def compare(models: dict[str, Any], size: int, *samplings: dict[str, Any], **settings: Any) -> None:
    """`size` ranks give the text of one process."""
    alone, shared = (engine(**models, **(SETTINGS | settings), **of) for of in ({}, {"tensor_parallel_size": size}))
    target = shared.runner.model.target
    assert isinstance(target, TensorParallelTarget)
    assert isinstance(target.lm_head, SlicedHead)
    for asked in rounds(samplings):
        found = mixed_texts(shared, asked)
        assert [len(text) for text in found] == [24] * len(PROMPTS)
        assert found == mixed_texts(alone, asked)
    end(shared)


def rounds(samplings: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the prompts ask for, again and again: as many unlike things as there are prompts, the special ones apart
    from the others but for one; by night each of them alone as well."""
    plain = [each for each in samplings if each not in SPECIAL]
    special = [each for each in samplings if each in SPECIAL]
    found = [plain, [*special, *plain[:1]]] if special else [plain]
    return [in_turn(each) for each in found] + [[each] * len(PROMPTS) for each in samplings if SCALE >= 4]


def proposals(built: BuiltEngine) -> list[Drafts]:
    """What the drafter proposes from now on, and how sure it is of it."""
    drafter, found = built.runner.model.drafter, []
    assert drafter is not None
    propose = drafter.propose

    def kept(batch: DraftBatch, sampler: DraftSampler) -> Drafts:
        found.append(propose(batch, replace(sampler, wants_confidence=True)))
        return found[-1]

    drafter.propose = kept
    return found


@pytest.mark.parametrize(("size", "tied"), [(2, True), by_night(4, False)])
def test_ranks_that_split_the_vocabulary_give_the_text_of_one(tmp_path: Path, size: int, tied: bool) -> None:
    compare(make_pair(tmp_path, {"tie_word_embeddings": tied}), size, GREEDY, SAMPLED, *FILTERED, *SPECIAL)


ALL = list(itertools.product(FAMILIES, (2, 4), (False, True)))


@pytest.mark.parametrize(("architecture", "size", "tied"), ALL if SCALE >= 4 else [(FAMILIES[-1], 2, True)])
def test_other_families_split_theirs(tmp_path: Path, architecture: str, size: int, tied: bool) -> None:
    # Four ranks need four key heads of a delta net.
    heads = {"linear_num_key_heads": 4} if architecture == "Qwen3_5MoeForCausalLM" else {}
    models = make_pair(tmp_path, {"architecture": architecture, "tie_word_embeddings": tied, **heads})
    samplings = [GREEDY, SAMPLED, *(FILTERED if SCALE >= 4 else [])]
    compare(models, size, *samplings, adaptive_speculation=True)


@pytest.mark.parametrize("dtype", [by_night("float32"), "bfloat16"])
def test_text_does_not_depend_on_the_batch(pair: dict[str, str], dtype: str) -> None:
    """With `batch_invariant` each rank's slice of the logits has the same bits in any batch."""
    settings: dict[str, Any] = SETTINGS | {"dtype": dtype, "batch_invariant": True, "enable_prefix_caching": False}
    built = engine(**pair, **settings, tensor_parallel_size=2)
    prompts = random_prompts(5, VOCAB_SIZE, longest=60)
    by_sum = {"temperature": 1.0, "seed": 8, "top_p": 0.9}
    for number, sampling in enumerate((by_sum, FILTERED[0]) if SCALE >= 4 else (by_sum,)):
        together = run(built, prompts, f"together{number} ", **sampling)
        alone = run(built, prompts[:1], f"alone{number} ", **sampling, num_speculative_tokens=0)
        assert differing(alone[1], together[1]) == 0
        assert alone[0]["0"] == together[0]["0"]
    end(built)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_rank_has_the_operations_that_rank_zero_has(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a CPU give a row the same bits anyway, as far as texts show."""

    class Loaded(Exception):
        pass

    def load_shard(*given: object, ops: LayerOps, fp8: bool) -> None:
        raise Loaded(type(ops))

    monkeypatch.setattr(rank, "load_shard", load_shard)
    cpu = torch.device("cpu")
    needs = Requirements(frozenset({AttentionPattern(True)}), frozenset({16}), torch.float32, "cpu", batch_invariant)
    asked = {"spec": None, "shard": None, "max_positions": 64, "fp8": False}
    setup: Any = SimpleNamespace(device=cpu, needs=needs, attention="torch", block_size=16, **asked)
    sums: Any = None
    with pytest.raises(Loaded) as loaded:
        rank._load(setup, sums)
    assert loaded.value.args == (type(select_ops(cpu, None, batch_invariant)),)


DRAFTERS: dict[str, Callable[[Path], object]] = {
    "dflash with logits of another form": lambda path: make_draft(
        path, output_multiplier=0.25, final_logit_softcapping=2.5, logit_scale=0.5
    ),
    "dspark": make_dspark,
    "eagle3, rows of the target's head": lambda path: make_eagle3(path, head=False),
}


@pytest.mark.parametrize("name", ["dspark", *map(by_night, sorted(DRAFTERS.keys() - {"dspark"}))])
def test_drafts_are_those_that_one_process_proposes(tmp_path: Path, name: str) -> None:
    make_target(tmp_path / "t", tie_word_embeddings=False)
    DRAFTERS[name](tmp_path / "d")
    models = {"target_model": str(tmp_path / "t"), "draft_model": str(tmp_path / "d")}
    alone, shared = engine(**models, **SETTINGS), engine(**models, **SETTINGS, tensor_parallel_size=2)
    expected, found = proposals(alone), proposals(shared)
    assert_same_texts(shared, alone, (GREEDY, SAMPLED))
    assert len(expected) == len(found) > 20
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.confidence is None) == (other.confidence is None)
        if one.confidence is not None and other.confidence is not None:
            torch.testing.assert_close(one.confidence, other.confidence, atol=1e-4, rtol=1e-4)
    end(shared)


def test_a_drafter_that_is_swapped_in_asks_the_ranks_from_the_thread_that_steps_alone(tmp_path: Path) -> None:
    """Ranks do what they are sent in one order; the thread that loads a drafter is another one."""
    make_target(tmp_path / "t", tie_word_embeddings=False)
    for name, seed in (("d", 5), ("other", 6)):
        make_eagle3(tmp_path / name, seed=seed, head=False)
    models = {"target_model": str(tmp_path / "t"), "draft_model": str(tmp_path / "d")}
    alone = engine(**models | {"draft_model": str(tmp_path / "other")}, **SETTINGS)
    shared = engine(**models, **SETTINGS, tensor_parallel_size=2)
    send, threads = group(shared).links.send, set()

    def sent(data: bytes) -> None:
        threads.add(threading.get_ident())
        send(data)

    group(shared).links.send = sent
    assert shared.drafters is not None
    wanted = SwapDrafter(swap_id="swap", draft_model=str(tmp_path / "other"))
    with ThreadPoolExecutor(1) as loader:
        swap = loader.submit(shared.drafters.load, wanted).result()
    assert not threads
    shared.core.swap_drafter(swap)
    assert [said.outcome for said in shared.core.step().drafter_swaps] == ["swapped"]
    assert threads == {threading.get_ident()}
    expected, found = proposals(alone), proposals(shared)
    assert_same_texts(shared, alone, (GREEDY,))
    assert len(expected) == len(found) > 10
    assert all(torch.equal(one.token_ids, other.token_ids) for one, other in zip(expected, found, strict=True))
    end(shared)


@pytest.mark.parametrize("name", ["dflash", *map(by_night, ("dspark without heads", "eagle3"))])
def test_the_steps_of_a_gpu_give_the_text_of_one(name: str, tmp_path: Path) -> None:
    models = make_pair(tmp_path, {"tie_word_embeddings": False})
    if name == "eagle3":
        make_eagle3(tmp_path / "d", head=False)
    elif name != "dflash":
        make_dspark(tmp_path / "d", rank=0, confidence=False)
    alone, shared = engine(**models, **SETTINGS), engine(**models, **SETTINGS, tensor_parallel_size=2)
    assert_same_texts(on_device_runner(shared), alone, (GREEDY, SAMPLED))
    end(shared)


def test_ranks_over_the_network_split_it_too(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    over_the_network(monkeypatch)
    compare(pair, 2, SAMPLED, FILTERED[0], **RAY)


def test_log_probabilities_are_those_of_one_process(pair: dict[str, str]) -> None:
    alone, shared = engine(**pair, **SETTINGS), engine(**pair, **SETTINGS, tensor_parallel_size=2)
    found = []
    for built in (alone, shared):
        outputs = outputs_of(built, PROMPTS, [{"max_tokens": 8, "temperature": 0.0, "logprobs": 3}] * len(PROMPTS))
        found.append(outputs.logprobs)
    for name, entries in found[0].items():
        for one, other in zip(entries, found[1][name], strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    end(shared)


def test_a_grammar_holds_for_ranks_that_split_the_vocabulary() -> None:
    """Of the demo pair, which has a tokenizer."""
    settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_gb": 0.05}
    asked = {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    alone, shared = LLM(**settings), LLM(**settings, tensor_parallel_size=2)
    prompts = ["Call me at", "What is 17 + 25?"]
    texts_of = [[output.text for output in llm.generate(prompts, **asked)] for llm in (alone, shared)]
    assert all(re.fullmatch("[0-9]{3}-[0-9]{4}", text) for text in texts_of[0])
    assert texts_of[0] == texts_of[1]
    end(shared.engine)


def test_a_small_vocabulary_stays_on_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make_pair(tmp_path, {"tie_word_embeddings": True})
    spec = read_target(tmp_path / "t")
    size = vocabulary_bytes(spec, torch.float32)
    assert size == VOCAB_SIZE * HIDDEN * 4
    for least, is_split in ((size, True), (size + 1, False)):
        monkeypatch.setattr("dflash_backend.parallel.group.MIN_SPLIT_BYTES", least)
        built = engine(**models, **SETTINGS, tensor_parallel_size=2)
        assert isinstance(built.runner.model.target.lm_head, SlicedHead) == is_split
        end(built)
