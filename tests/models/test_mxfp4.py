"""Experts stored in MXFP4 are those of `transformers`, to the bit, and a model with them is its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.gpt_oss import dequantise, in_products
from tests.models.test_families import CPU, MAX_POSITIONS, NUM_TOKENS, TOLERANCE, Pair, Reference
from tests.support.mxfp4_checkpoint import make_mxfp4_target, put
from tests.support.paged import block_tables, caches
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_under_every_scale_is_that_of_transformers_to_the_bit(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    ours = dequantise(blocks, scales, dtype)
    assert ours.shape == (1, 255, 16 * 32)
    assert torch.equal(ours.view(DTYPES[dtype]), theirs.contiguous().view(DTYPES[dtype]))


def test_the_numbers_are_those_of_the_format() -> None:
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)[None]
    numbers = dequantise(blocks, torch.tensor([128], dtype=torch.uint8), torch.float32)
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert numbers.tolist() == (positive + [-x for x in positive]) * 2


def test_codes_that_are_kept_stand_for_the_same_numbers_to_the_bit() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16)
    kept = in_products(blocks, scales)
    assert torch.equal(kept.dequantised(torch.float32), dequantise(blocks, scales, torch.float32))
    assert kept.num_bytes == blocks.numel() + scales.numel()


@pytest.mark.parametrize("read", [in_products, partial(dequantise, dtype=torch.float32)], ids=["kept", "numbers"])
def test_a_scale_that_is_not_a_number_is_refused(read: Callable[..., object]) -> None:
    with pytest.raises(CheckpointError, match="255, which is not a number"):
        read(torch.zeros(1, 2, 16, dtype=torch.uint8), torch.tensor([[1, 255]], dtype=torch.uint8))


@pytest.mark.parametrize("seed", range(3))
def test_a_model_in_mxfp4_gives_the_logits_of_transformers(tmp_path: Path, seed: int) -> None:
    sizes = [{}, {"hidden_size": 32, "intermediate_size": 64}, {"num_local_experts": 3, "intermediate_size": 32}]
    model = make_mxfp4_target(tmp_path, seed, **sizes[seed])
    spec = read_target(tmp_path)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    reference = Reference.run(model, ids)
    target = load_target(spec, MAX_POSITIONS, torch.float32, CPU)
    pair = Pair(model, target, reference, reference, kv=caches(spec.decoder))
    (logits,), _ = pair.run(block_tables(1), [(0, ids)])
    # The largest are above 8, and one row in sixty is ten times as far off as the others, whoever multiplies.
    largest = float(reference.logits.abs().max())
    torch.testing.assert_close(logits, reference.logits, atol=max(TOLERANCE["atol"], 4e-5 * largest), rtol=0.0)


def test_experts_come_in_the_serving_dtype_with_the_gates_rows_before_ups(tmp_path: Path) -> None:
    model = make_mxfp4_target(tmp_path)
    target = load_target(read_target(tmp_path), MAX_POSITIONS, torch.bfloat16, CPU)
    assert isinstance(target, DecoderTarget)
    theirs = model.get_parameter("model.layers.3.mlp.experts.gate_up_proj").transpose(1, 2).bfloat16()
    gate_up = target.layers[3].weights.mlp.gate_up
    assert isinstance(gate_up, torch.Tensor)
    assert gate_up.dtype == torch.bfloat16
    assert torch.equal(gate_up, torch.cat([theirs[:, ::2], theirs[:, 1::2]], dim=1))


def edit(directory: Path, **fields: object) -> None:
    file = directory / "config.json"
    put(file, json.loads(file.read_text(encoding="utf-8")) | fields)


def test_sizes_that_no_group_fits_are_refused(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path)
    edit(tmp_path, intermediate_size=40)
    with pytest.raises(CheckpointError, match="'intermediate_size' is 40; expected a multiple of 32"):
        read_target(tmp_path)


def test_other_quantisation_is_refused(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "nvfp4"})
    with pytest.raises(CheckpointError, match="quantization_config"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("blocks", lambda blocks: blocks.to(torch.int32), "is I32; expected one of U8"),
        ("scales", lambda scales: scales[:, :, :1].contiguous(), "has shape .*config.json asks for"),
        ("scales", lambda scales: torch.full_like(scales, 255), "layers.1.mlp.experts.down_proj_scales.*expert 0.*255"),
    ],
)
def test_packed_tensors_of_another_form_are_refused(tmp_path: Path, part: str, change: object, expected: str) -> None:
    make_mxfp4_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    tensors[name] = change(tensors[name])  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=expected):
        load_target(read_target(tmp_path), MAX_POSITIONS, torch.float32, CPU)
