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
    weight = _read(source, prefix, spec, "weight")
    return Linear(weight, _read(source, prefix, spec, "bias") if bias else None)


def head_order(spec: DecoderSpec) -> torch.Tensor:
    """Which number of a stored head comes to each place: int64 `[head_dim]`."""
    half, unrotated = (spec.rotary_dim or spec.head_dim) // 2, torch.arange(spec.rotary_dim, spec.head_dim)
    if not spec.rotary_dim:
        return torch.arange(spec.head_dim)
    low, high = unrotated.chunk(2)
    return torch.cat([torch.arange(half), low, torch.arange(half, 2 * half), high])


def _read(source: WeightSource, prefix: str, spec: DecoderSpec, kind: str) -> torch.Tensor:
    """The weights or biases of all four."""
    hidden = (spec.hidden_size,) if kind == "weight" else ()
    read = source.read_projection if kind == "weight" else source.read
    stored = [source.empty(rows, *hidden) for rows in (2 * spec.query_size, spec.kv_size, spec.kv_size)]
    for name, out in zip(("q_proj", "k_proj", "v_proj"), stored, strict=True):
        read(f"{prefix}{name}.{kind}", out)
    order = head_order(spec).to(stored[0].device)
    queries, gates = stored[0].unflatten(0, (spec.num_heads, 2, spec.head_dim)).unbind(1)
    keys = stored[1].unflatten(0, (spec.num_kv_heads, spec.head_dim))
    ordered = [heads.index_select(1, order).flatten(0, 1) for heads in (queries, keys)]
    return torch.cat([*ordered, stored[2], gates.flatten(0, 1)])
