"""The kernel that writes K/V by slot equals its reference."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.kv_write import kv_write, kv_write_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (2, 48), (3, 80), (8, 128), (5, 256)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_kernel_equals_reference_and_padding_writes_nothing(num_heads: int, head_dim: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    cache = torch.randn(16, 2, num_heads, head_dim, generator=generator).to(DEVICE)
    kv = torch.randn(num_tokens, 2, num_heads, head_dim, generator=generator).to(DEVICE)
    slots = torch.randperm(16, generator=generator)[:num_tokens].to(DEVICE)
    slots[1::3] = -1
    expected, actual = cache.clone(), cache.clone()
    kv_write_reference(kv, slots, expected, padded=True)
    kv_write(kv, slots, actual)
    assert torch.equal(actual, expected)
    untouched = sorted(set(range(16)) - set(slots[slots >= 0].tolist()))
    assert torch.equal(actual[untouched], cache[untouched])
