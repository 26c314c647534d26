"""How KV memory is shared between layers with a window and the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import ModelPair, resolve_pair
from dflash_backend.engine.sizing import Sizes, allocate_kv, kv_bytes, settle_sizes
from dflash_backend.engine.sizing import cpu_budget as budget_of
from dflash_backend.worker.kv_cache import bytes_per_block, window_bytes_per_block
from dflash_backend.worker.memory import GIB
from tests.support.tiny_models import make_target

F32 = torch.float32


def sizes(tmp_path: Path, architecture: str, mib: float, **settings: Any) -> tuple[EngineConfig, ModelPair, Sizes]:
    own = {"sliding_window": 64, "max_position_embeddings": 4096}
    make_target(tmp_path, architecture=architecture, **own)
    values = {"target_model": str(tmp_path), "draft_model": "", "max_num_seqs": 4, "max_num_batched_tokens": 256}
    config = EngineConfig.from_values({**values, "kv_cache_gb": mib / 1024, "device": "cpu", **settings})
    pair = resolve_pair(config)
    return config, pair, settle_sizes(config, pair, budget_of(config), F32)


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "Gemma4ForCausalLM", "MistralForCausalLM"])
def test_blocks_of_windows_take_their_part_and_the_others_the_rest(tmp_path: Path, architecture: str) -> None:
    config, pair, found = sizes(tmp_path, architecture, 16)
    whole = bytes_per_block(pair.target.decoder, None, 16, F32)
    of_windows = window_bytes_per_block(pair.target.decoder, 16, F32)
    # Twice four requests of a window of 64 positions, what they reserve and both ends; then two steps of 256 tokens.
    assert found.num_window_blocks == 2 * 4 * (5 + 2) + 32
    assert found.num_window_blocks < 16 * 2**20 // whole < found.num_blocks
    total = kv_bytes(config, pair, found.num_blocks, found.num_window_blocks, F32)
    assert total <= 16 * 2**20
    if of_windows < whole:
        assert total > 16 * 2**20 - whole
    kv = allocate_kv(config, pair, found.num_blocks, F32, torch.device("cpu"), found.num_window_blocks)
    of_layer = {
        len(layer.data): cache.sliding_window
        for layer, cache in zip(kv.target, pair.target.decoder.caches, strict=True)
    }
    assert of_layer.pop(found.num_window_blocks) == 64
    assert of_layer == ({} if architecture == "MistralForCausalLM" else {found.num_blocks: None})
    assert sum(layer.data.nbytes for layer in kv.target) == total


def test_blocks_of_windows_in_fp8_are_counted_with_their_scales(tmp_path: Path) -> None:
    config, pair, found = sizes(tmp_path, "Gemma4ForCausalLM", 16, kv_cache_dtype="fp8")
    kv = allocate_kv(config, pair, found.num_blocks, F32, torch.device("cpu"), found.num_window_blocks)
    tensors = [each for layer in kv.target for each in (layer.data, layer.scales) if each is not None]
    assert len(tensors) == 2 * len(kv.target)
    total = kv_bytes(config, pair, found.num_blocks, found.num_window_blocks, F32)
    assert sum(each.nbytes for each in tensors) == total <= 16 * 2**20


def test_a_pool_that_is_small_keeps_one_table_for_all_layers(tmp_path: Path) -> None:
    _, pair, found = sizes(tmp_path, "GptOssForCausalLM", 0.5)
    assert found.num_window_blocks == 0
    assert found.num_blocks == 2**19 // bytes_per_block(pair.target.decoder, None, 16, F32)


def test_no_layer_has_blocks_of_its_own_where_ranks_share_the_target(tmp_path: Path) -> None:
    assert sizes(tmp_path, "MistralForCausalLM", 16, tensor_parallel_size=2)[2].num_window_blocks == 0


def test_without_a_prefix_cache_there_are_blocks_for_those_that_run_alone(tmp_path: Path) -> None:
    found = sizes(tmp_path, "GptOssForCausalLM", 16, enable_prefix_caching=False)[2]
    assert found.num_window_blocks == 4 * (5 + 2) + 32


def test_memory_that_is_not_named_holds_no_more_than_all_requests_at_full_length(tmp_path: Path) -> None:
    _, _, found = sizes(tmp_path, "GptOssForCausalLM", 16, kv_cache_gb="auto", max_model_len=2048)
    assert found.num_blocks == 4 * 2048 // 16
    assert found.num_window_blocks == 2 * 4 * (5 + 2) + 32
    assert kv_bytes(*sizes(tmp_path, "GptOssForCausalLM", 16)[:2], 1, 0, F32) < GIB
