"""Weights from their codes: `(code - zero point) * scale` in float32, then the dtype that is served.

One function for all formats: what differs is how codes and zero points are unpacked, which `UNPACK` says by layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from dflash_backend.checkpoints.quantization.scheme import TRANSPOSED, Layout, Scheme, damaged
from dflash_backend.checkpoints.quantization.stored import Role, StoredWeight

Parts = Mapping[Role, torch.Tensor]
# Which of the eight numbers of an int32 of AWQ, by their bits, is that of the first row, of the second, and so on.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Float32 numbers that are made at a time.
CHUNK = 2**18


def dequantise(stored: StoredWeight, parts: Parts, out: torch.Tensor) -> None:
    """Make the weight `[out_features, in_features]` in `out`, in its dtype and on its device, where its parts go first.

    parts: as the files have them, or those of a part of a weight (`slices.read_parts`). Beside `out` it takes a byte
    for each number, and little else. Raises `CheckpointError` on parts that contradict each other, and on numbers that
    are not finite.
    """
    check_small_parts(stored, parts, out.shape)
    scheme, device = stored.scheme, out.device
    rows, columns = out.shape
    below, beside = scheme.blocks(rows, columns)
    moved = {role: part.to(device) for role, part in parts.items()}
    codes, zeros = UNPACK[scheme.layout](scheme, moved, rows, columns)
    scales = moved[Role.SCALE].float()
    scales = scales.T if scheme.layout in TRANSPOSED else scales.reshape(below, beside)
    block_of_column = torch.arange(columns, device=device) // (scheme.block[1] or columns)
    if Role.ORDER in moved:
        block_of_column = moved[Role.ORDER].long()
    block_of_row = torch.arange(rows, device=device) // (scheme.block[0] or rows)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        numbers = codes[part].float()
        if zeros is not None:
            numbers -= zeros[block_of_row[part]][:, block_of_column]
        numbers *= scales[block_of_row[part]][:, block_of_column]
        if not bool(numbers.isfinite().all()):
            raise damaged(stored.projection, "has numbers that are not finite")
        out[part] = numbers


def check_small_parts(stored: StoredWeight, parts: Parts, shape: Sequence[int]) -> None:
    """Raises `CheckpointError` where the small parts of a weight of `shape` contradict it or each other."""
    if Role.SHAPE in parts:
        check_shape(stored, parts[Role.SHAPE], shape)
    if Role.ZERO_BIAS in parts and bool(parts[Role.ZERO_BIAS].any()):
        raise damaged(stored.projection, "has a bias beside it, which this model does not have")
    if Role.ORDER in parts:
        order, (_, beside) = parts[Role.ORDER], stored.scheme.blocks(shape[0], shape[1])
        if int(order.min()) < 0 or int(order.max()) >= beside:
            raise damaged(stored.projection, f"puts columns in groups that are not from 0 to {beside - 1}")


def check_shape(stored: StoredWeight, part: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises `CheckpointError` unless the part that says the weight's shape says this one."""
    if part.tolist() != list(shape):
        raise damaged(stored.projection, f"says that its shape is {part.tolist()}, not {list(shape)}")


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits from int32 `[rows, words]`, the first in the lowest bits: uint8
    `[rows, words * 32 / bits]`."""
    # Little-endian, as safetensors files are.
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 0x0F, octets >> 4], dim=-1).flatten(-2)


Unpacked = tuple[torch.Tensor, torch.Tensor | None]


def _plain(scheme: Scheme, parts: Parts, rows: int, columns: int) -> Unpacked:
    zeros = parts.get(Role.ZERO)
    return parts[Role.CODES], None if zeros is None else zeros.float().reshape(scheme.blocks(rows, columns))


def _packed(scheme: Scheme, parts: Parts, rows: int, columns: int) -> Unpacked:
    """Codes and zero points are stored from 0 on, which cancels out; where there is no zero point, it is the middle."""
    codes = unpack(parts[Role.CODES], scheme.bits)[:, :columns]
    if Role.ZERO in parts:
        return codes, unpack(parts[Role.ZERO].T, scheme.bits)[:, :rows].T.float()
    return codes, torch.full(scheme.blocks(rows, columns), 2.0 ** (scheme.bits - 1), device=codes.device)


def _gptq(scheme: Scheme, parts: Parts, rows: int, columns: int) -> Unpacked:
    codes = unpack(parts[Role.CODES].T, scheme.bits)
    stored = unpack(parts[Role.ZERO], scheme.bits).T
    # The offset is taken modulo the codes: a zero point of 0 is stored as the largest code.
    return codes, ((stored.int() + scheme.zero_offset) % 2**scheme.bits).float()


def _awq(scheme: Scheme, parts: Parts, rows: int, columns: int) -> Unpacked:
    return _reorder(parts[Role.CODES], scheme.bits).T, _reorder(parts[Role.ZERO], scheme.bits).T.float()


def _reorder(words: torch.Tensor, bits: int) -> torch.Tensor:
    codes = unpack(words, bits)
    return codes.view(len(codes), -1, len(AWQ_ORDER))[..., AWQ_ORDER].flatten(-2)


UNPACK: dict[Layout, Callable[[Scheme, Parts, int, int], Unpacked]] = {
    Layout.FLOAT8: _plain,
    Layout.INT8: _plain,
    Layout.PACKED: _packed,
    Layout.GPTQ: _gptq,
    Layout.AWQ: _awq,
}
"""Codes `[out, in]` and zero points `[blocks below, blocks beside]` in float32, None for none."""
