"""The memory of the paged KV cache."""

from __future__ import annotations

import ctypes
import gc
import sys

import psutil
import pytest
import torch

from dflash_backend.checkpoints.targets import read_target
from dflash_backend.config import EngineConfig, asset_path
from dflash_backend.engine.process import build_claimed
from dflash_backend.worker.kv_cache import PagedKVCache, bytes_per_token
from dflash_kernels.huge_pages import HUGE_PAGE


def resident_bytes() -> int:
    gc.collect()  # what tests before left must not go in between
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_a_cpu_is_zeros_that_take_no_memory_before_they_are_used(dtype: torch.dtype) -> None:
    spec = read_target(asset_path("demo", "pair", "target")).decoder
    per_block = 16 * bytes_per_token(spec.caches, dtype)
    num_blocks = (512 << 20) // per_block
    before = resident_bytes()
    cache = PagedKVCache.allocate(spec, None, num_blocks, 16, dtype, torch.device("cpu"))
    assert resident_bytes() - before < 64 << 20
    assert len(cache.target) == len(spec.caches)
    assert not any(layer.data[-1].any() for layer in cache.target)
    assert all(layer.data.data_ptr() % HUGE_PAGE == 0 for layer in cache.target)
    assert {layer.data.dtype for layer in cache.target} == {dtype}
    cache.target[0].data[1] = 1.0
    assert not cache.target[0].data[0].any()
    assert not cache.target[0].data[2].any()


def release_free_memory() -> None:
    """Give back what earlier tests of this process have freed, which a pool could lie in."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def test_an_engine_of_a_server_holds_all_of_its_pool_from_the_start() -> None:
    config = EngineConfig.from_values({"kv_cache_gb": 0.25, "max_model_len": 256})
    release_free_memory()
    before = resident_bytes()
    built = build_claimed(config, lambda message, fraction: None)
    assert resident_bytes() - before > 200 << 20
    assert built.ready.num_kv_blocks > 100
