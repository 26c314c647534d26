"""A target whose layers several ranks share computes what the whole one does. The ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.checkpoints import read_target
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.interface import TargetOutput
from dflash_backend.models.parallel import Shard, load_shard, unsupported
from tests.paged import block_tables, caches, context
from tests.tiny_models import TARGET_LAYERS, VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread")
CPU = torch.device("cpu")
MAX_POSITIONS = 128
TIMEOUT_S = 20
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
    spec = read_target(tmp_path)
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
    for part, output in ranks:
        torch.testing.assert_close(output.hidden, expected.hidden, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(output.features, expected.features, atol=1e-4, rtol=1e-5)
        assert part.spec.decoder.num_kv_heads == max(1, spec.decoder.num_kv_heads // size)
    first = ranks[0][0]
    with torch.inference_mode():
        torch.testing.assert_close(first.logits(expected.hidden), whole.logits(expected.hidden))


@pytest.mark.parametrize(
    ("architecture", "size", "changes", "words"),
    [
        ("Qwen3MoeForCausalLM", 2, {}, "its experts are not split"),
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
