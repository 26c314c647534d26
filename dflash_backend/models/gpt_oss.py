"""gpt-oss's experts (arXiv 2508.10925): their tensors, in bfloat16 or in MXFP4, brought into the form of `SparseMlp`.

A checkpoint has gate and up side by side, number by number. In bfloat16 its matrices are transposed,
`[num_experts, in, out]`; in MXFP4 they are not, and `.._blocks` and `.._scales` hold them (`mxfp4.py`).
"""

from __future__ import annotations

import torch

from dflash_backend.checkpoints.spec import CheckpointError, MoeSpec
from dflash_backend.checkpoints.weights import WeightSource
from dflash_backend.models.linear import Linear
from dflash_backend.models.mlp import SparseMlp
from dflash_backend.models.mxfp4 import dequantise, packed_shapes


def read_gpt_oss_experts(source: WeightSource, prefix: str, hidden: int, moe: MoeSpec) -> SparseMlp:
    """The MLP whose tensors' names begin with `prefix`. hidden: size of a token. MXFP4 is dequantised to the source's
    dtype, expert by expert."""
    experts, inner, name = moe.num_experts, moe.intermediate_size, f"{prefix}experts."
    router = Linear.read(source, prefix, {"router": experts}, hidden, bias=True)
    gate_up = source.empty(experts, 2 * inner, hidden)
    down = source.empty(experts, hidden, inner)
    read = _read_packed if moe.mxfp4 else _read_transposed
    read(source, f"{name}gate_up_proj", gate_up, True)
    read(source, f"{name}down_proj", down, False)
    bias = gate_then_up(source.tensor(f"{name}gate_up_proj_bias", experts, 2 * inner))
    biases = bias, source.tensor(f"{name}down_proj_bias", experts, hidden)
    return SparseMlp(moe, router, gate_up, down, biases)


def gate_then_up(rows: torch.Tensor) -> torch.Tensor:
    """`[num_experts, 2 * inner, ...]` with gate and up in turns -> the same with the gate's rows before up's."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def _read_transposed(source: WeightSource, name: str, out: torch.Tensor, interleaved: bool) -> None:
    experts, rows, columns = out.shape
    matrices = source.tensor(name, experts, columns, rows).transpose(1, 2)
    out.copy_(gate_then_up(matrices) if interleaved else matrices)


def _read_packed(source: WeightSource, name: str, out: torch.Tensor, interleaved: bool) -> None:
    block_shape, scale_shape = packed_shapes(*out.shape)
    blocks = source.packed(f"{name}_blocks", *block_shape)
    scales = source.packed(f"{name}_scales", *scale_shape)
    if out.is_meta:  # the names and shapes are asked for alone
        return
    for expert in range(len(out)):
        try:
            matrix = dequantise(blocks[expert : expert + 1], scales[expert : expert + 1], out.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"tensor '{name}_scales', expert {expert}: {error}") from None
        out[expert] = (gate_then_up(matrix) if interleaved else matrix)[0]
