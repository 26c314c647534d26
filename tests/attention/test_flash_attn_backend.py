"""What the `flash_attn` backend hands to the package, held against a stand-in that does what the package documents."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dflash_backend.attention import BackendError, KVLayer, select_backend
from dflash_backend.attention import flash_attn_backend as module
from dflash_backend.attention.flash_attn_backend import FlashAttnBackend
from dflash_backend.attention.torch_backend import TorchBackend
from tests.attention.test_device_lengths import (
    DECODE,
    DEVICE,
    MIXED,
    PATTERNS,
    Rows,
    assert_rows_equal_reference,
    noise,
    run,
)
from tests.attention.test_selection import NEEDS
from tests.support.paged import BLOCK_SIZE


def documented_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    """`flash_attn_varlen_func` with a block table: query i of a row of q queries and n keys sees the keys from
    i + n - q - left to i + n - q + right, -1 meaning all; causal is right = 0. The rest of the output is not written.
    """
    assert k.stride(-1) == v.stride(-1) == 1
    out = torch.full_like(q, float("nan"))
    left, right = window_size
    right = 0 if causal else right
    group = q.shape[1] // k.shape[2]
    for row, table in enumerate(block_table):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        count, keys = last - first, int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert count <= max_seqlen_q
        assert keys <= max_seqlen_k
        key, value = (x[table].flatten(0, 1)[:keys].repeat_interleave(group, 1) for x in (k, v))
        distance = torch.arange(keys)[None, :] - torch.arange(keys - count, keys)[:, None]
        seen = torch.ones(count, keys, dtype=torch.bool)
        seen &= (distance <= right) if right >= 0 else seen
        seen &= (distance >= -left) if left >= 0 else seen
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), key.float()) * softmax_scale
        weights = scores.masked_fill(~seen.to(q.device), float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, value.float())
    return out


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if not pattern.sinks])
@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_the_packages_arguments_say_what_the_rows_see(
    monkeypatch: pytest.MonkeyPatch, rows: Rows, pattern: Any
) -> None:
    monkeypatch.setattr(module, "flash_attn_varlen_func", documented_varlen)
    query, layer, tables = noise(rows.num_tokens)
    actual = run(FlashAttnBackend(BLOCK_SIZE), rows.layout(tables), query, KVLayer(layer.data.to(DEVICE)), pattern)
    assert_rows_equal_reference(actual, rows, query, layer, tables, pattern)


def test_what_the_package_cannot_do_is_refused_with_the_reason() -> None:
    backends = {
        "flash_attn": (FlashAttnBackend.capabilities, FlashAttnBackend),
        "other": (dataclasses.replace(TorchBackend.capabilities, head_dims=None), TorchBackend),
    }
    needs = dataclasses.replace(NEEDS, device="cuda", dtype=torch.float32, head_dims=frozenset({100, 320}))
    lacks = r"attention sinks, head size 100, head size 320, float32, kv_block_size 16 \(it takes multiples of 256\)"
    with pytest.raises(BackendError, match=f"'flash_attn' lacks {lacks}.*would do: other"):
        select_backend("flash_attn", needs, 16, backends)
    patterns = frozenset(pattern for pattern in NEEDS.patterns if not pattern.sinks)
    able = dataclasses.replace(
        NEEDS, patterns=patterns, device="cuda", dtype=torch.bfloat16, head_dims=frozenset({64, 128})
    )
    assert select_backend("flash_attn", able, 512, backends).name == "flash_attn"
