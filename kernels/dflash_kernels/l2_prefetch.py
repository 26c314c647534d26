"""Asks for the weight of the next product while a small kernel runs, so that the product finds a part of it in L2.

Between two products of a decode step lie kernels that move next to nothing (norms, the gate, the rotation) or less than
the memory could (attention of few rows), and a product needs a while until its own loads are on their way. Some more
programs of such a kernel issue `cp.async.bulk.prefetch.L2` (PTX, from compute capability 9.0 on) and end at once:
nothing waits for what they asked for, and no result depends on it.

Each program of a product reads some rows of its weight `[out_features, in_features]`, from the first column on, or,
where programs split the columns, from several. So the same number of bytes of all rows is asked for, at as many
columns: every program of the product gains alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from dflash_kernels.triton_import import tl, triton

FIRST_ARCH = 90
# Programs that ask, beside those that a kernel has.
NUM_PROGRAMS = tl.constexpr(132)
# Tokens of a step up to which a product is bound by the memory.
MAX_TOKENS = 256
# A line of the cache: what is asked for at a time is a multiple of it.
LINE_BYTES = 128


@dataclass(frozen=True)
class Reach:
    """How much of a weight is asked for: bytes at most, 0 for nothing, and at how many columns of each row."""

    max_bytes: int
    num_columns: int = 1


# Of the weight that comes after each kernel. Not measured yet, so off.
REACH = {"norm": Reach(0), "gate": Reach(0), "rotation": Reach(0)}


@dataclass(frozen=True)
class Prefetch:
    """Of a weight the first `width` bytes of each of `num_pieces` pieces of `stride` bytes, by `num_programs` programs;
    nothing where these are 0."""

    num_programs: int = 0
    num_pieces: int = 0
    stride: int = 0
    width: int = 0


NOTHING = Prefetch()


def prefetch(weight: torch.Tensor | None, num_tokens: int, kernel: str) -> Prefetch:
    """What a kernel, named as in `REACH`, asks for of the weight `[out_features, in_features]` of the next product, in
    a step of `num_tokens`."""
    if weight is None or num_tokens > MAX_TOKENS or weight.ndim != 2 or not has_prefetch(weight.device.type):
        return NOTHING
    return _planned(len(weight), weight.shape[1] * weight.itemsize, REACH[kernel])


@cache
def _planned(num_rows: int, row_bytes: int, reach: Reach) -> Prefetch:
    stride = row_bytes // reach.num_columns
    num_pieces = num_rows * reach.num_columns
    width = min(reach.max_bytes // num_pieces, stride) // LINE_BYTES * LINE_BYTES
    if width == 0 or stride % LINE_BYTES:
        return NOTHING
    return Prefetch(int(NUM_PROGRAMS.value), num_pieces, stride, width)


@cache
def has_prefetch(device_type: str) -> bool:
    """Whether kernels on such a device can ask; false where they are interpreted."""
    if device_type != "cuda" or not isinstance(prefetch_l2, triton.JITFunction):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_ARCH)


@triton.jit
def prefetch_l2(program, weight_ptr, num_pieces, stride, width, NUM_PROGRAMS: tl.constexpr, THREADS: tl.constexpr):
    """One of the programs that ask. THREADS: of a program, each of which asks for pieces of its own."""
    address = weight_ptr.to(tl.int64)
    for first in range(program * THREADS, num_pieces, NUM_PROGRAMS * THREADS):
        piece = first + tl.arange(0, THREADS)
        there = (piece < num_pieces).to(tl.int32)
        tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.s32 there, $3, 0;
            @there cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [address + piece.to(tl.int64) * stride, width, there],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
