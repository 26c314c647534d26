"""Weights that stay quantised in memory: their parts as products take them, whatever layout the files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dflash_backend.checkpoints.quantization.dequantise import UNPACK, Parts, check_small_parts
from dflash_backend.checkpoints.quantization.keepable import FP8, Kind, kind_of
from dflash_backend.checkpoints.quantization.scheme import TRANSPOSED, Layout, damaged
from dflash_backend.checkpoints.quantization.slices import Read, Slice, read_parts, splits_block
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


def keep(
    stored: StoredWeight, parts: Parts, shape: tuple[int, int], device: torch.device, kind: Kind = None
) -> KeptWeight:
    """The weight of `shape` from its parts as the files have them. kind: that of the weight of which these are rows, by
    default this one's own. Raises `CheckpointError` as `dequantise` does."""
    check_small_parts(stored, parts, shape)
    scheme = stored.scheme
    found = kind or kind_of(scheme, shape[1], shape[0])
    assert found is not None
    name, columns = found
    moved = {role: part.to(device) for role, part in parts.items()}
    codes, zeros = UNPACK[scheme.layout](scheme, moved, *shape)
    order = order_of(moved[Role.ORDER]) if Role.ORDER in moved else None
    codes = codes if order is None else codes[:, order]
    scales = moved[Role.SCALE]
    scales = scales.T if scheme.layout in TRANSPOSED else scales.reshape(scheme.blocks(*shape))
    if name == FP8:
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
        name,
        codes,
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.uint8).contiguous(),
        scheme.block[0] or shape[0],
        columns,
        order,
    )


def keep_slice(
    stored: StoredWeight, read: Read, shape: tuple[int, int], device: torch.device, taken: Slice
) -> KeptWeight:
    """As `keep`, of a slice of `shape` that `is_kept_slice` allows: it alone is read."""
    whole, kind, found = taken.whole(shape), kind_of(stored.scheme, shape[1], shape[0]), []
    for start, stop in taken.bounds(shape):
        parts = read_parts(stored, read, whole, taken.dim, start, stop)
        assert parts is not None
        own = (stop - start, shape[1]) if taken.dim == 0 else shape
        found.append(keep(stored, parts, own, device, kind))
    return found[0] if len(found) == 1 else _below_one_another(found)


def is_kept_slice(stored: StoredWeight, shape: tuple[int, int], taken: Slice) -> bool:
    """Whether a slice of `shape` is a weight by the same scheme: no word or block is cut."""
    bounds = taken.bounds(shape)
    if taken.dim == 1 and len(bounds) > 1:
        return False
    return not any(splits_block(stored, taken.whole(shape), taken.dim, *each) for each in bounds)


def groups_of(stored: StoredWeight, read: Read, shape: tuple[int, int], taken: Slice | None) -> torch.Tensor | None:
    """The group of each column of a weight, or of a slice, of `shape`, among its own: int `[in_features]`. None where
    the files have none. A slice whose columns are in groups of others has groups that do not exist."""
    name = stored.tensors.get(Role.ORDER)
    if name is None:
        return None
    groups = read(name, (slice(None),))
    if taken is None or taken.dim == 0:
        return groups
    ((start, stop),) = taken.bounds(shape)
    return groups[start:stop] - start // (stored.scheme.block[1] or taken.whole(shape)[1])


def _below_one_another(parts: Sequence[KeptWeight]) -> KeptWeight:
    """The rows of all parts, which are of one weight, with a scale each: blocks of rows may end where parts do not."""
    scales, zeros = [], []
    for part in parts:
        rows = len(part.codes)
        scales.append(part.scales.repeat_interleave(part.rows, dim=0)[:rows])
        zeros.append(None if part.zeros is None else part.zeros.repeat_interleave(part.rows, dim=0)[:rows])
    points = [each for each in zeros if each is not None]
    codes = torch.cat([part.codes for part in parts])
    return replace(parts[0], codes=codes, scales=torch.cat(scales), zeros=torch.cat(points) if points else None, rows=1)


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
