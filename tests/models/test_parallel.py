"""A target whose layers several ranks share computes what the whole one does. The ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import read_target
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.interface import TargetOutput
from dflash_backend.models.parallel import Shard, load_shard, unsupported
from tests.models.test_text_parts import stack_experts
from tests.mxfp4_checkpoint import make_mxfp4_target
from tests.paged import block_tables, caches, context
from tests.tiny_models import TARGET_LAYERS, VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread")
CPU = torch.device("cpu")
MAX_POSITIONS = 128
TIMEOUT_S = 20
MOE, GPT_OSS = "Qwen3MoeForCausalLM", "GptOssForCausalLM"
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
    "gpt-oss, one K/V head": (GPT_OSS, 4, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


class ThreadSum:
    """The sum over ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def reduce(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """As `models.parallel.Reduce`, of a rank."""
        self._parts[rank] = x
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        return total


def run(target: DecoderTarget, token_ids: torch.Tensor, capture: tuple[int, ...]) -> TargetOutput:
    """Two rows of a prompt, then a chunk of both."""
    with torch.inference_mode():
        kv, tables = caches(target.spec.decoder), block_tables(2)
        first, second = token_ids[:40], token_ids[40:]
        target.forward(first, context(tables, [0, 0], [25, 15], target.patterns), kv, ())
        return target.forward(second, context(tables, [25, 15], [3, 9], target.patterns), kv, capture)


@pytest.mark.parametrize("name", CASES)
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


def check_shared(directory: Path, size: int) -> None:
    """The target in `directory` computes alone what `size` ranks do, of which each has the same bits."""
    spec = read_target(directory)
    assert unsupported(spec, size) is None
    token_ids = torch.from_numpy(np.random.default_rng(5).integers(1, VOCAB_SIZE, 52))
    capture = (1, TARGET_LAYERS)
    whole = load_target(spec, MAX_POSITIONS, torch.float32, CPU)
    assert isinstance(whole, DecoderTarget)
    expected = run(whole, token_ids, capture)
    total = ThreadSum(size)

    def of_rank(rank: int) -> tuple[DecoderTarget, TargetOutput]:
        part = load_shard(spec, Shard(rank, size), lambda x: total.reduce(rank, x), MAX_POSITIONS, torch.float32, CPU)
        return part, run(part, token_ids, capture)

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(of_rank, range(size)))
    first, output = ranks[0]
    # The weights that random MXFP4 gives are large, and so is what rounding changes.
    atol = max(1e-4, 1e-5 * float(expected.hidden.abs().max()))
    torch.testing.assert_close(output.hidden, expected.hidden, atol=atol, rtol=1e-5)
    torch.testing.assert_close(output.features, expected.features, atol=atol, rtol=1e-5)
    for part, other in ranks:
        assert torch.equal(other.hidden, output.hidden)
        assert part.spec.decoder.num_kv_heads == max(1, spec.decoder.num_kv_heads // size)
    with torch.inference_mode():
        torch.testing.assert_close(first.logits(expected.hidden), whole.logits(expected.hidden))


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
        ("Gemma4ForCausalLM", 2, {}, "layers of Gemma 4"),
        ("Qwen3_5ForCausalLM", 2, {}, "recurrent state"),
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
