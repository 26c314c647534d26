"""Weights that stay quantised in memory: their parts as products take them, whatever layout the files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_backend.checkpoints.quantization.dequantise import UNPACK, Parts, check_small_parts
from dflash_backend.checkpoints.quantization.keepable import FP8, TRANSPOSED, kind_of
from dflash_backend.checkpoints.quantization.scheme import Layout, damaged
from dflash_backend.checkpoints.quantization.stored import Role, StoredWeight

# Of e4m3: the largest number, and the codes that are none.
LARGEST, NOT_A_NUMBER = 448.0, 0x7F
# What makes signed integers of 8 bits unsigned.
SIGNED = 128


@dataclass(frozen=True)
class KeptWeight:
    """A weight `[out_features, in_features]`: a number is `(code - zero point) * scale`.

    kind: FP8, of e4m3, INT8 or INT4. codes: uint8 `[out_features, in_features]`, one in a byte, integers from 0 on.
    scales: `[ceil(out_features / rows), ceil(in_features / columns)]`, float32 for FP8, else of the file's dtype.
    zeros: uint8 of the same shape, for integers. rows, columns: how many share a scale. order: int64 `[in_features]`,
    which number of the input each column is multiplied by; None where they are in order.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    rows: int
    columns: int
    order: torch.Tensor | None = None


def keep(stored: StoredWeight, parts: Parts, shape: tuple[int, int], device: torch.device) -> KeptWeight:
    """The weight of `shape` from its parts as the files have them. Raises `CheckpointError` as `dequantise` does."""
    check_small_parts(stored, parts, shape)
    scheme = stored.scheme
    found = kind_of(scheme, shape[1], shape[0])
    assert found is not None
    kind, columns = found
    moved = {role: part.to(device) for role, part in parts.items()}
    codes, zeros = UNPACK[scheme.layout](scheme, moved, *shape)
    order = order_of(moved[Role.ORDER]) if Role.ORDER in moved else None
    codes = codes if order is None else codes[:, order]
    scales = moved[Role.SCALE]
    scales = scales.T if scheme.layout in TRANSPOSED else scales.reshape(scheme.blocks(*shape))
    if kind == FP8:
        scales, zeros = scales.float(), None
        codes = codes.contiguous().view(torch.uint8)
        has_nan = bool(((codes & NOT_A_NUMBER) == NOT_A_NUMBER).any())
    else:
        has_nan = False
        if scheme.layout is Layout.INT8:  # signed ones
            codes, zeros = codes.int() + SIGNED, None if zeros is None else zeros + SIGNED
        codes = codes.to(torch.uint8)
    if has_nan or not bool((scales.float() * LARGEST).isfinite().all()):
        raise damaged(stored.projection, "has numbers that are not finite")
    return KeptWeight(
        kind,
        codes,
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.uint8).contiguous(),
        scheme.block[0] or shape[0],
        columns,
        order,
    )


def order_of(groups: torch.Tensor) -> torch.Tensor | None:
    """Which column comes to each place so that those of a group lie side by side: int64 `[in_features]`, by the group
    of each, int `[in_features]`. None where they do."""
    order = groups.long().argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def have_one_order(groups: Sequence[torch.Tensor | None], columns: int, ordered: bool) -> bool:
    """Whether the columns of all weights are in one order, by the group of each column, int `[in_features]`, of a
    weight, or None where they are in order; and all groups have `columns`. ordered: it may be another than that of the
    input."""
    if not all(each is None or _is_even(each, columns) for each in groups):
        return False
    first, *others = [None if each is None else order_of(each) for each in groups]
    if first is None:
        return all(other is None for other in others)
    return ordered and all(other is not None and torch.equal(first, other) for other in others)


def _is_even(groups: torch.Tensor, columns: int) -> bool:
    """Whether each group has `columns` of them."""
    num_groups = len(groups) // columns
    # A damaged file may have any number here, which the counts would have a place for.
    if len(groups) % columns or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        return False
    counts = groups.long().bincount(minlength=num_groups)
    return bool((counts == columns).all())
