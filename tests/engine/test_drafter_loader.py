"""Another drafter in the place of the one that drafts: its drafts, the text, and what cannot take that place."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend import LLM, SamplingParams
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, asset_path
from dflash_backend.core.admission import RequestError
from dflash_backend.drafters.exchange import exchange_weights, paired_tensors
from dflash_backend.messages import GenerationRequest
from dflash_backend.models.linear import Linear
from dflash_backend.parallel.vocabulary import ParallelVocabulary, SlicedHead
from tests.support.tiny_models import decoder_config, eagle3_shapes, make_draft, make_pair, save_checkpoint

PROMPT = list(range(10, 45))
SETTINGS = {"max_num_seqs": 4, "max_model_len": 256, "adaptive_speculation": False, "kv_cache_gb": 0.01}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("swap")
    make_pair(found)
    make_draft(found / "other", seed=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset_path("demo", "pair", "target", name), found / "t")
    return found


def engine(directory: Path, draft: str, **settings: object) -> LLM:
    return LLM(target=str(directory / "t"), draft=str(directory / draft), **(SETTINGS | settings))


def answers(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Of two requests the tokens, and how many of their drafts were accepted by position."""
    outputs = llm.generate([PROMPT, PROMPT[:20]], max_tokens=40, temperature=0, ignore_eos=True)
    return [
        (output.token_ids, output.stats.spec_decoding.num_accepted_tokens_per_pos) for output in outputs if output.stats
    ]


def test_it_drafts_what_it_would_in_an_engine_of_its_own_and_the_text_stays(directory: Path) -> None:
    alone = {name: answers(engine(directory, name)) for name in ("d", "other")}
    assert alone["d"] != alone["other"], "both drafters guess alike"
    llm = engine(directory, "d")
    assert answers(llm) == alone["d"]
    assert llm.engine.drafters is not None
    assert llm.engine.drafters.drafting in llm.engine.ready.description
    llm.swap_drafter(str(directory / "other"))
    assert llm.engine.drafters.drafting.startswith("drafter other (")
    # Prompts that were cached with the context KV of the other drafter are computed anew.
    assert answers(llm) == alone["other"]
    llm.swap_drafter(str(directory / "d"))
    assert llm.engine.drafters.drafting == llm.engine.ready.drafting
    assert answers(llm) == alone["d"]


def test_what_waits_for_the_drafter_before_is_written_first(directory: Path) -> None:
    """Context of requests that do not draft waits until it fills a block; the next drafter would never write it."""
    llm = engine(directory, "d")
    step, core = llm.engine.runner.model, llm.engine.core
    sampling = SamplingParams(max_tokens=40, temperature=0.0, num_speculative_tokens=0)
    core.add_request(GenerationRequest("resting", PROMPT[:20], sampling))
    for _ in range(4):
        core.step()
    core.collect_drafts()
    assert step.pending is not None
    (index,) = [index for index in range(len(step.state.tokens)) if step.pending.num_waiting(index)]
    first = 20 // step.kv.block_size * step.kv.block_size
    count = step.pending.num_waiting(index)
    block = int(step.state.blocks[index, first // step.kv.block_size])
    layer = step.kv.draft[0].data[block].clone()
    llm.swap_drafter(str(directory / "other"))
    assert count > 0
    assert not torch.equal(step.kv.draft[0].data[block], layer)
    assert step.pending is not None
    core.abort(["resting"])


def test_captured_graphs_read_the_new_weights_at_the_old_addresses(directory: Path) -> None:
    alone = answers(engine(directory, "other"))
    llm = engine(directory, "d")
    llm.engine.runner.captured = True  # as on a GPU
    before = llm.engine.runner.model.drafter
    assert before is not None
    norm = before.model.final_norm
    llm.swap_drafter(str(directory / "other"))
    assert llm.engine.runner.model.drafter is before
    assert before.model.final_norm is norm
    assert answers(llm) == alone


def test_what_was_exchanged_is_all_and_comes_back(directory: Path) -> None:
    llm = engine(directory, "d")
    assert llm.engine.drafters is not None
    one = llm.engine.runner.model.drafter
    assert one is not None
    swap = engine(directory, "other")
    other = swap.engine.runner.model.drafter
    assert other is not None
    # The target's own tensors, which both read, are none of a drafter's. Here each engine has its own.
    other.lm_head = one.lm_head
    pairs = paired_tensors(one, other)
    values = [(mine.clone(), theirs.clone()) for mine, theirs in pairs]
    assert len(pairs) == 19, "of two layers 14, and 5 of all"
    exchange_weights(one, other)
    for (mine, theirs), (mine_before, theirs_before) in zip(pairs, values, strict=True):
        assert torch.equal(mine, theirs_before)
        assert torch.equal(theirs, mine_before)
    exchange_weights(one, other)
    assert all(torch.equal(pair[0], before[0]) for pair, before in zip(pairs, values, strict=True))


def test_memory_that_two_tensors_share_is_exchanged_once() -> None:
    one, other = ({"all": data, "part": data[3:]} for data in (torch.arange(8.0), torch.arange(8.0) + 10))
    exchange_weights(one, other)
    assert one["all"].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert other["part"].tolist() == [3, 4, 5, 6, 7]


def test_a_head_that_ranks_share_is_none_of_a_drafters() -> None:
    """What reaches the ranks, such as a socket, cannot be looked into, and both drafters have the same."""
    reached: Any = iter([])
    part: Any = SimpleNamespace(slices=[range(4), range(4, 8)], sockets=reached)
    head = SlicedHead(Linear(torch.zeros(4, 2)), ParallelVocabulary(part, reached))
    one, other = ({"lm_head": head, "norm": torch.full((2,), value)} for value in (1.0, 2.0))
    assert len(paired_tensors(one, other)) == 1
    with pytest.raises(ValueError, match="lm_head"):
        paired_tensors(one, other | {"lm_head": Linear(torch.zeros(8, 2))})


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, r"a is float32\[2\] in one and float32\[3\] in the other"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": 1}, "b is in one of them only"),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 3.0}]}, "a.1.b is 2.0 in one and 3.0 in the other"),
        ({"a": iter([])}, {"a": iter([])}, "a is a list_iterator, whose weights cannot be found"),
    ],
)
def test_what_differs_is_named(mine: object, theirs: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_weights(mine, theirs)


def test_drafters_that_differ_in_more_than_weights_are_not_exchanged(directory: Path) -> None:
    make_draft(directory / "scaled", seed=2, rms_norm_eps=1e-5)
    llm = engine(directory, "d")
    llm.engine.runner.captured = True
    with pytest.raises(ConfigError, match=r"CUDA graphs were captured with \(.*eps is 1e-06 in one and 1e-05"):
        llm.swap_drafter(str(directory / "scaled"))
    assert not llm.engine.core.has_unfinished()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 4}, "proposes at most 3 tokens, and num_speculative_tokens is 7"),
        ({"max_position_embeddings": 128}, "runs 128 positions, and the present one 512"),
        ({"sliding_window": 32, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
         "attention to 32, all positions, and the KV cache is made for 2 layers with 2 KV heads"),
    ],
)  # fmt: skip
def test_a_drafter_that_needs_an_engine_of_its_own_is_refused(
    directory: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    make_draft(tmp_path / "new", **changes)
    llm = engine(directory, "d")
    with pytest.raises(ConfigError, match=message) as refused:
        llm.swap_drafter(str(tmp_path / "new"))
    assert "restart the server with it as draft_model" in str(refused.value)
    assert answers(llm)


def test_what_is_no_drafter_of_this_target_is_refused(directory: Path, tmp_path: Path) -> None:
    llm = engine(directory, "d")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        llm.swap_drafter(str(tmp_path / "none"))
    with pytest.raises(CheckpointError):
        llm.swap_drafter(str(directory / "t"))
    make_draft(tmp_path / "wide", num_target_layers=9)
    with pytest.raises(CheckpointError, match="9"):
        llm.swap_drafter(str(tmp_path / "wide"))
    broken = tmp_path / "broken"
    make_draft(broken)
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError):
        llm.swap_drafter(str(broken))
    config = decoder_config(1, 64, 128) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128}
    save_checkpoint(tmp_path / "eagle3", config, {n: torch.zeros(s) for n, s in eagle3_shapes("midlayer.", 64).items()})
    with pytest.raises((ConfigError, CheckpointError)):
        llm.swap_drafter(str(tmp_path / "eagle3"))
    assert not llm.engine.core.has_unfinished()


def test_tiers_of_kv_are_those_of_the_present_drafter(directory: Path) -> None:
    llm = engine(directory, "d", kv_host_gb=0.01)
    with pytest.raises(ConfigError, match="KV tiers"):
        llm.swap_drafter(str(directory / "other"))


def test_without_a_drafter_there_is_none_to_take_the_place_of(directory: Path) -> None:
    llm = engine(directory, "d", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="no drafter that is a model"):
        llm.swap_drafter(str(directory / "other"))


def test_one_that_is_compared_is_not_swapped_again(directory: Path) -> None:
    llm = engine(directory, "d")
    llm.swap_drafter(str(directory / "other"), window=10_000)
    with pytest.raises(RequestError, match="still compared"):
        llm.swap_drafter(str(directory / "d"))
