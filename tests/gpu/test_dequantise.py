"""Weights that are dequantised on a GPU are those of the CPU to the bit: one multiplication in float32 either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import read_target
from dflash_backend.models import load_target
from tests.support.quantised import AWQ, FP8_BLOCK, GPTQ, Packer, awq, fp8_block, gptq, write
from tests.support.tiny_models import make_target


@pytest.mark.parametrize(
    ("packer", "config"),
    [(fp8_block(), FP8_BLOCK), (gptq(shuffled=True), GPTQ | {"desc_act": True}), (awq(), AWQ)],
    ids=["fp8", "gptq", "awq"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_cpu(
    tmp_path: Path, packer: Packer, config: dict[str, Any], dtype: torch.dtype
) -> None:
    make_target(tmp_path / "source", hidden_size=160, intermediate_size=272)
    spec = read_target(write(tmp_path / "source", tmp_path, packer, config).quantised)
    models = [load_target(spec, 64, dtype, torch.device(device)) for device in ("cuda", "cpu")]
    for found, expected in zip(models[0].layers, models[1].layers, strict=True):
        assert torch.equal(found.weights.qkv.weight.cpu(), expected.weights.qkv.weight)
        assert torch.equal(found.weights.mlp.down.weight.cpu(), expected.weights.mlp.down.weight)
