"""Gated attention, as Qwen3-Next has it: one more projection whose sigmoid multiplies what attention gives, and a
rotation of only a part of each head.

The kernels rotate number i of a head with number i + head_dim / 2. So that they need not know of the part, the numbers
of query and key heads change places at load: the rotated ones come first in each half. Scores stay the same.
"""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import Linear


def read_gated_qkv(source: WeightSource, prefix: str, spec: DecoderSpec, bias: bool) -> Linear:
    """hidden -> queries, keys, values and gates, from tensors whose names begin with `prefix`. They are stored with
    each query head before its gate."""
    rows = {"q_proj": 2 * spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    stored = Linear.read(source, prefix, rows, spec.hidden_size, bias)
    return stored.rows(_row_order(spec).to(source.device))


def head_order(spec: DecoderSpec) -> torch.Tensor:
    """Which number of a stored head comes to each place: int64 `[head_dim]`."""
    half, unrotated = (spec.rotary_dim or spec.head_dim) // 2, torch.arange(spec.rotary_dim, spec.head_dim)
    if not spec.rotary_dim:
        return torch.arange(spec.head_dim)
    low, high = unrotated.chunk(2)
    return torch.cat([torch.arange(half), low, torch.arange(half, 2 * half), high])


def _row_order(spec: DecoderSpec) -> torch.Tensor:
    """Which stored row comes to each place, int64 `[2 * query_size + 2 * kv_size]`."""
    order, queries = head_order(spec), 2 * spec.query_size
    rows = torch.arange(queries + 2 * spec.kv_size)
    heads, gates = rows[:queries].unflatten(0, (spec.num_heads, 2, spec.head_dim)).unbind(1)
    keys, values = rows[queries:].unflatten(0, (2, spec.num_kv_heads, spec.head_dim))
    return torch.cat([heads[:, order].flatten(), keys[:, order].flatten(), values.flatten(), gates.flatten()])
