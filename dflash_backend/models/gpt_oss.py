"""gpt-oss's experts (arXiv 2508.10925): their tensors, in bfloat16 or in MXFP4, brought into the form of `SparseMlp`.

A checkpoint has gate and up side by side, number by number. In bfloat16 its matrices are transposed,
`[num_experts, in, out]`; in MXFP4 they are not, and `.._blocks` and `.._scales` hold them, which stay so where products
read their codes. MXFP4 has numbers of 4 bits in groups of 32 that share a power of two (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_backend.checkpoints.experts import MXFP4_GROUP
from dflash_backend.checkpoints.spec import CheckpointError, MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import Linear
from dflash_backend.models.mlp import SparseMlp
from dflash_kernels.mxfp4 import NOT_A_NUMBER, SCALE_BIAS, VALUES
from dflash_kernels.quantised_weight import MXFP4, QuantisedWeight, WeightStack


def read_gpt_oss_experts(source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> SparseMlp:
    """The MLP whose tensors' names begin with `prefix`. hidden: size of a token. MXFP4 stays as it is where the source
    keeps quantised weights; else it is dequantised to the source's dtype, expert by expert."""
    experts, inner, name = moe.num_experts, moe.intermediate_size, f"{prefix}experts."
    router = Linear.read(source, prefix, {"router": experts}, hidden, bias=True)
    read = _read_transposed if not moe.mxfp4 else _read_kept if source.keep_quantised else _read_packed
    gate_up = read(source, f"{name}gate_up_proj", (experts, 2 * inner, hidden), True)
    down = read(source, f"{name}down_proj", (experts, hidden, inner), False)
    bias = gate_then_up(source.tensor(f"{name}gate_up_proj_bias", experts, 2 * inner))
    biases = bias, source.tensor(f"{name}down_proj_bias", experts, hidden)
    return SparseMlp(moe, router, gate_up, down, biases)


def gate_then_up(rows: torch.Tensor) -> torch.Tensor:
    """`[num_experts, 2 * inner, ...]` with gate and up in turns -> the same with the gate's rows before up's."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


Shape = tuple[int, int, int]


def _read_transposed(source: WeightSource, name: str, shape: Shape, interleaved: bool) -> torch.Tensor:
    experts, rows, columns = shape
    matrices = source.tensor(name, experts, columns, rows).transpose(1, 2)
    return gate_then_up(matrices) if interleaved else matrices.contiguous()


def _read_packed(source: WeightSource, name: str, shape: Shape, interleaved: bool) -> torch.Tensor:
    """As numbers."""
    out = source.empty(*shape)
    blocks, scales = _packed(source, name, shape)
    if out.is_meta:  # the names and shapes are asked for alone
        return out
    for expert in range(len(out)):
        with _naming(name, expert):
            matrix = dequantise(blocks[expert : expert + 1], scales[expert : expert + 1], out.dtype)
        out[expert] = (gate_then_up(matrix) if interleaved else matrix)[0]
    return out


def _read_kept(source: WeightSource, name: str, shape: Shape, interleaved: bool) -> QuantisedWeight:
    """In codes."""
    blocks, scales = _packed(source, name, shape)
    stack = WeightStack(shape[0])
    for expert in range(shape[0]):
        own = blocks[expert : expert + 1], scales[expert : expert + 1]
        of_blocks, of_scales = map(gate_then_up, own) if interleaved else own
        with _naming(name, expert):
            stack.add(in_products(of_blocks[0], of_scales[0]))
    return stack.whole()


def _packed(source: WeightSource, name: str, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks and scales of all experts."""
    block_shape, scale_shape = packed_shapes(*shape)
    blocks = source.tensor(f"{name}_blocks", *block_shape, dtype=torch.uint8)
    return blocks, source.tensor(f"{name}_scales", *scale_shape, dtype=torch.uint8)


@contextmanager
def _naming(name: str, expert: int) -> Iterator[None]:
    """Errors of an expert's weights say whose they are."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"tensor '{name}_scales', expert {expert}: {error}") from None


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks: uint8 `[..., groups, 16]`, two codes each, the lower half of a byte first. scales: uint8 `[..., groups]`.
    Returns `[..., groups * 32]` in `dtype`, each number rounded once (in bfloat16 none needs it).

    Raises `CheckpointError` on a scale that is not a number.
    """
    check_scales(scales)
    pairs, powers = _tables(blocks.device)
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.float32).view(*scales.shape, MXFP4_GROUP)
    return numbers.mul_(powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)).to(dtype).flatten(-2)


def check_scales(scales: torch.Tensor) -> None:
    """Raises `CheckpointError` on a scale that is not a number."""
    if bool((scales == NOT_A_NUMBER).any()):
        raise CheckpointError("a scale of MXFP4 weights is 255, which is not a number: fetch the checkpoint again")


def in_products(blocks: torch.Tensor, scales: torch.Tensor) -> QuantisedWeight:
    """The same weight as `dequantise` makes of `[rows, groups, 16]` and `[rows, groups]`, in the layout of the products
    by codes. Raises `CheckpointError` as that does."""
    check_scales(scales)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(1)
    return QuantisedWeight.of_codes(MXFP4, codes, scales, None, 1, MXFP4_GROUP)


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte, float32 and looked up as one int64 `[256]`, and the powers of two of the scales:
    float32 `[256]`, the last of which is none."""
    values = [(VALUES[byte & 0x0F], VALUES[byte >> 4]) for byte in range(256)]
    powers = [math.ldexp(1.0, byte - SCALE_BIAS) for byte in range(NOT_A_NUMBER)]
    pairs = torch.tensor(values, dtype=torch.float32).view(torch.int64).flatten()
    return pairs.to(device), torch.tensor([*powers, math.nan], dtype=torch.float32).to(device)


def packed_shapes(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the blocks and of the scales of a tensor of this shape, whose last size is a multiple of 32."""
    *rows, columns = shape
    groups = columns // MXFP4_GROUP
    return (*rows, groups, MXFP4_GROUP // 2), (*rows, groups)
