"""Runs the library compressed-tensors, which writes quantised weights and makes weights of them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.quantised import Packer, Tensors

NOT_INSTALLED = "compressed-tensors is not installed; run make setup"
FP8 = {"num_bits": 8, "type": "float"}
GROUP = {"strategy": "group", "group_size": 16}

# The format, and the arguments of the weights.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 of tensors": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8 of rows": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8 of blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 32]}),
    "fp8, plainly": ("naive-quantized", FP8 | {"strategy": "channel"}),
    "int8 of rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 of rows with zero points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 of tensors with zero points": ("int-quantized", {"num_bits": 8, "strategy": "tensor", "symmetric": False}),
    "int4 of groups in bytes": ("int-quantized", {"num_bits": 4, **GROUP}),
    "int4 of groups": ("pack-quantized", {"num_bits": 4, **GROUP}),
    "int4 of groups with zero points": ("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUP}),
    "int4 of rows with zero points": ("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "channel"}),
    "int4 of tensors": ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}),
    "int8 of groups, packed": ("pack-quantized", {"num_bits": 8, "symmetric": False, **GROUP}),
}


def limits(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number that share each scale."""
    out, inner = weight.shape
    strategy = str(args.strategy)
    rows, columns = {"tensor": (out, inner), "channel": (1, inner), "group": (1, args.group_size)}.get(
        strategy, args.block_structure
    )
    below, beside = -(-out // rows), -(-inner // columns)
    padded = torch.zeros(below * rows, beside * columns)
    padded[:out, :inner] = weight
    blocks = padded.view(below, rows, beside, columns)
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    return (low[0], high[0]) if strategy == "tensor" else (low, high)


def library(form: str, args: dict[str, Any]) -> Packer:
    """What the library makes of a weight, and of that again. Skips the test where it is not installed."""
    pytest.importorskip("compressed_tensors", reason=NOT_INSTALLED)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor: Any = BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale, zero = calculate_qparams(*limits(weight, weights), weights)
        parts = compressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(weights.pytorch_dtype())}, scheme
        )
        return parts, compressor.decompress(parts, scheme)["weight"].float()

    return pack


def config(form: str, args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The `quantization_config` of one group."""
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | changes


def golden_weight() -> torch.Tensor:
    """A weight `[10, 80]` with rows of one sign, whose zero points lie at the ends."""
    weight = torch.randn(10, 80, generator=torch.Generator().manual_seed(11))
    weight[3], weight[4] = weight[3].abs(), -weight[4].abs()
    return weight


def results(scratch: Path) -> tuple[Tensors, dict[str, Any]]:
    """What `golden/` holds: for each format the parts of the weight, and what the library makes of them."""
    tensors: Tensors = {}
    for name, (form, args) in FORMATS.items():
        parts, weight = library(form, args)(golden_weight())
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in parts.items()}
        tensors[f"{name}/expected"] = weight.contiguous()
    return tensors, {"formats": {name: list(of) for name, of in FORMATS.items()}}
