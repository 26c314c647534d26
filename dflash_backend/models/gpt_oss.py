"""gpt-oss's experts (arXiv 2508.10925): their tensors, in bfloat16 or in MXFP4, brought into the form of `SparseMlp`.

A checkpoint has gate and up side by side, number by number. In bfloat16 its matrices are transposed,
`[num_experts, in, out]`; in MXFP4 they are not, and `.._blocks` and `.._scales` hold them (`mxfp4.py`), which
stay so where products read their codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_backend.checkpoints.spec import CheckpointError, MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import Linear
from dflash_backend.models.mlp import SparseMlp
from dflash_backend.models.mxfp4 import dequantise, in_products, packed_shapes
from dflash_kernels.quantised_weight import QuantisedWeight, WeightStack


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
    return source.packed(f"{name}_blocks", *block_shape), source.packed(f"{name}_scales", *scale_shape)


@contextmanager
def _naming(name: str, expert: int) -> Iterator[None]:
    """Errors of an expert's weights say whose they are."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"tensor '{name}_scales', expert {expert}: {error}") from None
