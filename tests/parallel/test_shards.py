"""A target whose layers several ranks share computes what the whole one does. The ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import read_target, weights
from dflash_backend.checkpoints.quantization import slices
from dflash_backend.checkpoints.quantization.dequantise import dequantise
from dflash_backend.checkpoints.quantization.stored import StoredWeight
from dflash_backend.checkpoints.spec import TargetSpec
from dflash_backend.checkpoints.weights import Progress
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget, Gemma4Target
from dflash_backend.models.interface import TargetModel, TargetOutput
from dflash_backend.models.linear import embedded, table_of
from dflash_backend.parallel.shard import Shard, unsupported
from dflash_backend.parallel.target import load_shard
from dflash_backend.parallel.vocabulary import Lookup, VocabularyPart
from tests.models.test_text_parts import stack_experts
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.paged import block_tables, caches, context, noisy_pool
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Packer,
    awq,
    fp8_block,
    fp8_rows,
    fp8_tensor,
    gptq,
    write,
    write_by_name,
)
from tests.support.scale import others_by_night
from tests.support.tiny_models import GEMMA4_EXPERTS, TARGET_LAYERS, VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread")
CPU = torch.device("cpu")
MAX_POSITIONS = 128
TIMEOUT_S = 20
MOE, GPT_OSS, GEMMA4 = "Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma4ForCausalLM"
FOUR_KEY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", 2, {}),
    "qwen3 untied, fewer K/V heads than ranks": ("Qwen3ForCausalLM", 4, {"tie_word_embeddings": False}),
    "qwen2 with windows": (
        "Qwen2ForCausalLM",
        2,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "llama with biases": ("LlamaForCausalLM", 2, {"attention_bias": True, "mlp_bias": True}),
    "llama, one K/V head": ("LlamaForCausalLM", 2, {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", 4, {"num_key_value_heads": 4}),
    "qwen3-moe": (MOE, 2, {}),
    "qwen3-moe untied, router weights as they are": (
        MOE,
        4,
        {"tie_word_embeddings": False, "norm_topk_prob": False},
    ),
    # The size of a dense MLP that no layer has may be any.
    "qwen3-moe, sizes of experts alone count": (MOE, 4, {"intermediate_size": 50}),
    "qwen3-moe and dense layers": (MOE, 4, {"decoder_sparse_step": 2, "attention_bias": True}),
    "gpt-oss": (GPT_OSS, 2, {}),
    "qwen3-next": ("Qwen3NextForCausalLM", 2, {}),
    "qwen3-next, fewer K/V heads than ranks": ("Qwen3NextForCausalLM", 4, FOUR_KEY_HEADS | {"attention_bias": True}),
    "qwen3.5": ("Qwen3_5ForCausalLM", 2, {}),
    "qwen3.5, a key head for each rank": ("Qwen3_5ForCausalLM", 4, FOUR_KEY_HEADS),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", 2, {"tie_word_embeddings": False}),
    "gemma 4": (GEMMA4, 2, {}),
    "gemma 4, experts, values of their own": (GEMMA4, 4, GEMMA4_EXPERTS | {"attention_k_eq_v": False}),
    "gpt-oss, one K/V head": (GPT_OSS, 4, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


class ThreadSum:
    """The sum over ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def reduce(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """As `parallel.target.Reduce`, of a rank."""
        self._parts[rank] = x
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        return total


def run(target: TargetModel, token_ids: torch.Tensor, dtype: torch.dtype) -> TargetOutput:
    """Two rows of a prompt, then a chunk of both."""
    with torch.inference_mode():
        kv, tables = caches(target.spec.decoder, dtype), block_tables(2)
        pool = noisy_pool(target.spec.decoder, dtype)
        first, second = token_ids[:40], token_ids[40:]
        prompt = context(tables, [0, 0], [25, 15], dtype, pool=pool)
        target.forward(first, prompt, kv, ())
        if prompt.states is not None:
            prompt.states.commit(torch.tensor([25, 15], dtype=torch.int32))
        chunk = context(tables, [25, 15], [3, 9], dtype, pool=pool)
        return target.forward(second, chunk, kv, (1, TARGET_LAYERS))


# By day one of each form of layers; of each of these there is another.
BY_NIGHT = {
    "qwen3",
    "mistral",
    "qwen3-moe",
    "qwen3-moe untied, router weights as they are",
    "qwen3-next",
    "qwen3.5",
    "gemma 4",
}


@pytest.mark.parametrize("name", others_by_night(CASES, CASES.keys() - BY_NIGHT))
def test_shared_layers_compute_what_the_whole_target_does(tmp_path: Path, name: str) -> None:
    architecture, size, changes = CASES[name]
    make_target(tmp_path, architecture=architecture, **changes)
    check_shared(tmp_path, size)


def test_experts_in_one_tensor_are_shared(tmp_path: Path) -> None:
    make_target(tmp_path, architecture=MOE)
    file = tmp_path / "model.safetensors"
    save_file(stack_experts(load_file(file)), file)
    check_shared(tmp_path, 4)


@pytest.mark.parametrize(("size", "inner"), [(2, 64), (4, 128)])
def test_experts_in_mxfp4_are_shared(tmp_path: Path, size: int, inner: int) -> None:
    make_mxfp4_target(tmp_path, intermediate_size=inner)
    check_shared(tmp_path, size)


QUANTISED: dict[str, tuple[Packer, dict[str, Any]]] = {
    "fp8, blocks that ranks share": (fp8_block(), FP8_BLOCK),
    "fp8, blocks within a rank": (fp8_block(8, 4), FP8_BLOCK | {"weight_block_size": [8, 4]}),
    "fp8, blocks across a border": (fp8_block(24, 24), FP8_BLOCK | {"weight_block_size": [24, 24]}),
    "fp8, a scale for each row": (fp8_rows, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}),
    "fp8, a scale": (fp8_tensor(), {"quant_method": "fp8", "activation_scheme": "static"}),
    "gptq": (gptq(group=8), GPTQ | {"group_size": 8}),
    "gptq, columns in an order of their own": (gptq(shuffled=True), GPTQ | {"desc_act": True}),
    "gptq, groups that ranks share": (gptq(group=32), GPTQ | {"group_size": 32}),
    "awq": (awq(group=8), AWQ | {"group_size": 8}),
}


@pytest.mark.parametrize("name", others_by_night(QUANTISED, QUANTISED.keys() - {"fp8, a scale", "gptq"}))
def test_ranks_read_their_part_of_quantised_weights(tmp_path: Path, name: str) -> None:
    packer, config = QUANTISED[name]
    make_target(tmp_path / "source", intermediate_size=64)
    copies = write(tmp_path / "source", tmp_path, packer, config)
    check_shared(copies.quantised, 2)
    # To the bit what the same part of the weights in plain float32 is.
    for rank in range(2):
        parts = [load(copies.quantised, Shard(rank, 2)), load(copies.plain, Shard(rank, 2))]
        for layer, plain in zip(*(each.layers for each in parts), strict=True):
            assert torch.equal(layer.weights.output.weight, plain.weights.output.weight)
            assert torch.equal(layer.weights.qkv.weight, plain.weights.qkv.weight)
            assert torch.equal(layer.weights.mlp.part.down.weight, plain.weights.mlp.part.down.weight)


def test_parts_of_packed_weights_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where words and groups end at a rank's border, no rank makes the whole weight."""
    make_target(tmp_path / "source", intermediate_size=64)
    copies = write(tmp_path / "source", tmp_path, gptq(group=8), GPTQ | {"group_size": 8})
    made: list[int] = []

    def count(stored: StoredWeight, parts: Any, out: torch.Tensor) -> None:
        made.append(out.numel())
        dequantise(stored, parts, out)

    monkeypatch.setattr(slices, "dequantise", count)
    load(copies.quantised, Shard(0, 1))
    whole, made[:] = sum(made), []
    load(copies.quantised, Shard(1, 2))
    assert sum(made) * 2 == whole > 0


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_fp8_at_load_rounds_whole_rows(tmp_path: Path, architecture: str) -> None:
    make_target(tmp_path, architecture=architecture)
    check_shared(tmp_path, 2, fp8=True)


@pytest.mark.parametrize("architecture", [MOE, "Qwen3_5ForCausalLM"])
def test_sums_of_a_rank_that_are_off_by_an_ulp_neither_stop_nor_change_anything_else(
    tmp_path: Path, architecture: str
) -> None:
    """As on a machine whose arithmetic differs: its experts may be others, and no rank waits for another's choice."""
    make_target(tmp_path, architecture=architecture)
    spec = read_target(tmp_path)
    alone, of_ranks = logits(spec, torch.float32, 1, False), logits(spec, torch.float32, 2, False, off_by=1)
    assert error(of_ranks, alone) < 1e-4


@pytest.mark.parametrize(("size", "said"), [(8, 0), (24, 1)])
def test_weights_that_a_border_cuts_are_said_once(tmp_path: Path, size: int, said: int) -> None:
    """However many of a target's weights it cuts."""
    make_target(tmp_path / "source", intermediate_size=64)
    config = FP8_BLOCK | {"weight_block_size": [size, size]}
    copies = write(tmp_path / "source", tmp_path, fp8_block(size, size), config)
    lines: list[str] = []
    load(copies.quantised, Shard(0, 2), lambda line, fraction: lines.append(line))
    assert len([line for line in lines if "dequantised whole" in line]) == said


def load(directory: Path, shard: Shard, progress: Progress | None = None) -> DecoderTarget:
    """A rank's part of the target, whose sums are its own. Gemma 4's has the same attributes."""
    part = load_shard(read_target(directory), shard, lambda x: x, MAX_POSITIONS, torch.float32, CPU, progress)
    assert isinstance(part, DecoderTarget | Gemma4Target)
    return cast(DecoderTarget, part)


def check_shared(directory: Path, size: int, fp8: bool = False) -> None:
    """The target in `directory` computes alone what `size` ranks do, of which each has the same bits. In float64 but
    for what is float32 in any case; in float32 the ranks are as near to that as one process is."""
    spec = read_target(directory)
    assert unsupported(spec, size) is None
    exact, exact_of_ranks = (logits(spec, torch.float64, each, fp8) for each in (1, size))
    scale = max(1.0, float(exact.abs().max()))
    # The states of recurrent layers are float32.
    assert error(exact_of_ranks, exact) < scale * (2e-6 if spec.decoder.delta_net is not None else 1e-10)
    alone, of_ranks = (logits(spec, torch.float32, each, fp8) for each in (1, size))
    assert error(of_ranks, exact) < max(1e-5 * scale, 2 * error(alone, exact))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference."""
    return float((found - exact).abs().max())


def logits(spec: TargetSpec, dtype: torch.dtype, size: int, fp8: bool, off_by: int = 0) -> torch.Tensor:
    """Those of a chunk of tokens, by `size` ranks, or one process. off_by: how many units in the last place the sums of
    ranks other than 0 are too large."""
    token_ids = torch.from_numpy(np.random.default_rng(5).integers(1, VOCAB_SIZE, 52))
    if size == 1:
        whole = load_target(spec, MAX_POSITIONS, dtype, CPU, fp8=fp8)
        return whole.logits(run(whole, token_ids, dtype).hidden)
    total = ThreadSum(size)

    def of_rank(rank: int) -> tuple[TargetModel, TargetOutput]:
        def sums(x: torch.Tensor) -> torch.Tensor:
            found = total.reduce(rank, x)
            for _ in range(off_by if rank > 0 else 0):
                found = torch.nextafter(found, torch.full_like(found, torch.inf))
            return found

        part = load_shard(spec, Shard(rank, size), sums, MAX_POSITIONS, dtype, CPU, fp8=fp8)
        return part, run(part, token_ids, dtype)

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(of_rank, range(size)))
    first, output = ranks[0]
    for part, other in ranks if not off_by else []:
        assert torch.equal(other.hidden, output.hidden)
        assert other.features is not None
        assert output.features is not None
        assert torch.equal(other.features, output.features)
        assert part.spec.decoder.num_kv_heads == max(1, spec.decoder.num_kv_heads // size)
    return first.logits(output.hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_rank_0_alone_holds_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    make_target(tmp_path, tie_word_embeddings=tied)
    first, second = load(tmp_path, Shard(0, 2)), load(tmp_path, Shard(1, 2))
    assert first.embedding.shape[0] == first.lm_head.out_features == VOCAB_SIZE
    assert second.embedding.numel() == second.lm_head.weight.numel() == 0
    assert torch.equal(second.embed(torch.tensor([3, 5])), torch.zeros(2, first.spec.decoder.hidden_size))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_split_the_vocabulary_hold_their_rows(tmp_path: Path, tied: bool, size: int) -> None:
    """Of a vocabulary that the ranks do not divide."""
    make_target(tmp_path, tie_word_embeddings=tied)
    whole = load(tmp_path, Shard(0, 1))
    parts = [load(tmp_path, Shard(rank, size, True)) for rank in range(size)]
    tables = [embedded(torch.arange(part.embedding.shape[0]), part.embedding) for part in parts]
    assert torch.equal(torch.cat(tables), embedded(torch.arange(VOCAB_SIZE), whole.embedding))
    assert torch.equal(torch.cat([part.lm_head.weight for part in parts]), whole.lm_head.weight)
    assert max(map(len, tables)) == -(-VOCAB_SIZE // size)
    token_ids = torch.arange(VOCAB_SIZE).flip(0)
    assert torch.equal(sum(part.embed(token_ids) for part in parts), whole.embed(token_ids))
    if tied:
        assert all(table_of(part.lm_head) is part.embedding for part in parts)


@pytest.mark.parametrize("scaled", [True, False])
def test_ranks_give_a_drafter_the_rows_that_it_asks_for(tmp_path: Path, scaled: bool) -> None:
    """Gemma 4's as its first layer reads them, or as they are stored; from both slices together."""
    make_target(tmp_path, architecture="Gemma4ForCausalLM")
    whole, token_ids = load(tmp_path, Shard(0, 1)), torch.arange(VOCAB_SIZE).flip(0)
    parts = [load(tmp_path, Shard(rank, 2, True)) for rank in range(2)]
    slices = [Shard(rank, 2, True).vocabulary(VOCAB_SIZE) for rank in range(2)]

    def rows(rank: int) -> torch.Tensor:
        part = VocabularyPart(parts[rank], slices, rank, AloneSums())
        return part.rows(Lookup(token_ids, scaled=scaled))

    expected = embedded(token_ids, whole.embedding) * (whole.embedding.shape[1] ** 0.5 if scaled else 1.0)
    torch.testing.assert_close(rows(0) + rows(1), expected)
    torch.testing.assert_close(whole.embed(token_ids, scaled), expected)


class AloneSums:
    """What one rank has, for a test that adds them."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def test_a_quantised_head_is_split(tmp_path: Path) -> None:
    """With blocks of one scale across the border of two ranks."""
    make_target(tmp_path / "source", tie_word_embeddings=False)
    config = FP8_BLOCK | {"weight_block_size": [20, 24]}
    pack = fp8_block(20, 24)
    copies = write_by_name(
        tmp_path / "source", tmp_path, lambda name: pack if name == "lm_head.weight" else None, config
    )
    parts = [load(copies.quantised, Shard(rank, 4, True)).lm_head.weight for rank in range(4)]
    assert torch.equal(torch.cat(parts), load(copies.plain, Shard(0, 1)).lm_head.weight)


def test_a_slice_of_rows_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few parts of equal size a vocabulary has."""
    make_target(tmp_path)
    reads: list[str] = []
    stored = weights._CheckpointFiles._stored

    def kept(self: Any, name: str, *args: Any) -> torch.Tensor:
        reads.append(name)
        return stored(self, name, *args)

    monkeypatch.setattr(weights._CheckpointFiles, "_stored", kept)
    load(tmp_path, Shard(1, 2, True))
    assert reads.count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize("architecture", [MOE, GPT_OSS])
def test_a_rank_holds_its_part_of_each_expert(tmp_path: Path, architecture: str) -> None:
    make_target(tmp_path, architecture=architecture)
    spec, shard = read_target(tmp_path), Shard(1, 4)
    part = load_shard(spec, shard, lambda x: x, MAX_POSITIONS, torch.float32, CPU)
    whole = load_target(spec, MAX_POSITIONS, torch.float32, CPU)
    assert isinstance(whole, DecoderTarget)
    own, all_of_it = part.layers[2].weights.mlp.part, whole.layers[2].weights.mlp
    assert own.gate_up.numel() * 4 == all_of_it.gate_up.numel()
    assert own.down.numel() * 4 == all_of_it.down.numel()
    torch.testing.assert_close(own.down, all_of_it.down[:, :, 6:12], atol=0, rtol=0)
    torch.testing.assert_close(own.router.weight, all_of_it.router.weight, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "size", "changes", "words"),
    [
        (MOE, 5, {"num_attention_heads": 10}, "24 inner numbers of an expert"),
        (MOE, 4, {"decoder_sparse_step": 2, "intermediate_size": 50}, "50 inner numbers of its MLP"),
        (
            GEMMA4,
            4,
            {"num_attention_heads": 12, "num_global_key_value_heads": 3, "num_key_value_heads": 4},
            "3 K/V heads are neither",
        ),
        (GEMMA4, 4, GEMMA4_EXPERTS | {"intermediate_size": 50}, "50 inner numbers of its MLP"),
        ("Qwen3_5ForCausalLM", 4, {}, "2 key heads of a gated delta net"),
        ("Qwen3NextForCausalLM", 2, {"shared_expert_intermediate_size": 21}, "21 inner numbers of its shared expert"),
        ("Qwen3ForCausalLM", 3, {}, "4 attention heads are no multiple"),
        ("Qwen3ForCausalLM", 4, {"intermediate_size": 50}, "50 inner numbers of its MLP"),
        (
            "LlamaForCausalLM",
            4,
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6},
            "6 K/V heads are neither",
        ),
    ],
)
def test_what_cannot_be_shared_is_named(
    tmp_path: Path, architecture: str, size: int, changes: dict[str, Any], words: str
) -> None:
    make_target(tmp_path, architecture=architecture, **changes)
    assert words in str(unsupported(read_target(tmp_path), size))


def test_groups_of_mxfp4_are_not_split(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path)
    assert "the 3 MXFP4 groups of an expert are no multiple" in str(unsupported(read_target(tmp_path), 2))


@pytest.mark.parametrize(("vocab_size", "size"), [(97, 2), (97, 4), (8, 4), (4, 4), (151_936, 3)])
def test_slices_hold_each_token_once(vocab_size: int, size: int) -> None:
    found = [Shard(rank, size, True).vocabulary(vocab_size) for rank in range(size)]
    assert [token for each in found for token in each] == list(range(vocab_size))
    assert max(map(len, found)) - min(map(len, found)) <= 1
