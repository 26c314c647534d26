"""Checkpoints that compressed-tensors writes: ours give the logits of the weights that the library itself makes of
them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.oracle.compressed_tensors_library import FORMATS, FP8, GROUP, NOT_INSTALLED, config, library, limits
from tests.support.quantised import (
    Copies,
    Packer,
    Tensors,
    edit_config,
    edit_tensors,
    is_projection,
    write,
    write_by_name,
)
from tests.support.quantised_logits import assert_same_logits, projections, weight_of
from tests.support.tiny_models import make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
MOE = "Qwen3MoeForCausalLM"
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 272}


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_library_writes_gives_the_logits_of_its_weights(tmp_path: Path, name: str) -> None:
    form, args = FORMATS[name]
    make_target(tmp_path / "source", **SIZES)
    assert_same_logits(write(tmp_path / "source", tmp_path, library(form, args), config(form, args)))


@pytest.mark.parametrize("name", ["fp8 of rows", "int4 of groups with zero points"])
def test_experts_and_an_ignored_router(tmp_path: Path, name: str) -> None:
    form, args = FORMATS[name]
    make_target(tmp_path / "source", architecture=MOE, tie_word_embeddings=False, moe_intermediate_size=48, **SIZES)
    fields = config(form, args, ignore=["lm_head", "re:.*mlp[.]gate$"])
    assert_same_logits(write(tmp_path / "source", tmp_path, library(form, args), fields))


def mixed(tmp_path: Path, **sizes: Any) -> Copies:
    """Layer 0 in FP8, `down_proj` of the others in INT8, the rest in INT4; one projection by its own name in FP8 of the
    tensor, and one that is ignored."""
    packers = {name: library(*FORMATS[name]) for name in FORMATS}
    groups = {
        name: {"targets": targets, "weights": FORMATS[name][1], "format": FORMATS[name][0]}
        for name, targets in {
            "int4 of groups": ["Linear"],
            "int8 of rows": ["re:.*down_proj$"],
            "fp8 of rows": [r"re:model\.layers\.0\."],
            "fp8 of tensors": ["model.layers.1.mlp.down_proj"],
        }.items()
    }

    def pack(name: str) -> Packer | None:
        if not is_projection(name) or name == "model.layers.2.self_attn.k_proj.weight":
            return None
        if name == "model.layers.1.mlp.down_proj.weight":
            return packers["fp8 of tensors"]
        # Both patterns match this one: the library takes the first by their text.
        if name == "model.layers.0.mlp.down_proj.weight":
            return packers["int8 of rows"]
        if name.startswith("model.layers.0."):
            return packers["fp8 of rows"]
        return packers["int8 of rows"] if "down_proj" in name else packers["int4 of groups"]

    make_target(tmp_path / "source", **sizes)
    fields = config("mixed-precision", {}, config_groups=groups, ignore=["lm_head", "model.layers.2.self_attn.k_proj"])
    return write_by_name(tmp_path / "source", tmp_path, pack, fields)


def test_each_projection_has_the_scheme_of_its_group_and_fused_ones_of_several(tmp_path: Path) -> None:
    copies = mixed(tmp_path, **SIZES)
    assert "model.layers.2.self_attn.k_proj" not in projections(copies.quantised)
    assert_same_logits(copies)


@pytest.mark.parametrize(
    ("form", "args", "status"),
    [
        ("pack-quantized", {"num_bits": 4, **GROUP}, "compressed"),
        ("float-quantized", FP8 | {"strategy": "channel"}, "compressed"),
    ],
)
def test_a_whole_model_that_the_library_saves(tmp_path: Path, form: str, args: dict[str, Any], status: str) -> None:
    """Its own config and file, with activations that are to be quantised as well: they are not, here."""
    pytest.importorskip("compressed_tensors", reason=NOT_INSTALLED)
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.apply import apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model: PreTrainedModel = make_target(tmp_path / "source", **SIZES)
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} if form[0] == "f" else None
    group = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    plain = load_file(tmp_path / "source" / "model.safetensors")
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            weight, packer = module.weight.data.float(), library(form, args)
            scale, _ = calculate_qparams(*limits(weight, scheme.weights), scheme.weights)
            module.weight_scale.data.copy_(scale)
            plain[f"{name}.weight"] = packer(weight)[1]
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    copies = Copies(tmp_path / "quantised", tmp_path / "source")
    model.save_pretrained(copies.quantised)
    compressor.update_config(copies.quantised)
    save_file(plain, copies.plain / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(copies)


def test_columns_in_groups_of_their_own_order(tmp_path: Path) -> None:
    """`actorder: group`, which the library no longer writes: a column's scale is that of its group."""
    form, args = FORMATS["int4 of groups"]
    make_target(tmp_path / "source")
    name = "model.layers.0.self_attn.q_proj"
    order = torch.arange(32).flip(0) // 16
    pack = library(form, args)

    def pack_one(tensor: str) -> Callable[[torch.Tensor], Any] | None:
        if tensor != f"{name}.weight":
            return None

        def ordered(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
            parts, plain = pack(weight)
            scale = parts["weight_scale"]
            # The library's own weights, each column scaled anew.
            plain = plain / scale.repeat_interleave(16, dim=1) * scale[:, order]
            return parts | {"weight_g_idx": order.to(torch.int32)}, plain

        return ordered

    groups = {"group_0": {"targets": [name], "weights": args | {"actorder": "group"}}}
    copies = write_by_name(tmp_path / "source", tmp_path, pack_one, config(form, args, config_groups=groups))
    found, expected = weight_of(copies.quantised, name, 64, 32), weight_of(copies.plain, name, 64, 32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_older_field_and_scales_in_bfloat16(tmp_path: Path) -> None:
    form, args = FORMATS["int4 of groups"]
    make_target(tmp_path / "source")
    copies = write(tmp_path / "source", tmp_path, library(form, args), {})
    fields = config(form, args)
    del fields["quant_method"]
    edit_config(copies.quantised, quantization_config=None, compression_config=fields)
    name = "model.layers.0.mlp.gate_proj.weight_scale"

    def to_bfloat16(tensors: Tensors) -> None:
        tensors[name] = tensors[name].bfloat16()

    before = weight_of(copies.quantised, "model.layers.0.mlp.gate_proj", 48, 32)
    scale = load_file(copies.quantised / "model.safetensors")[name]
    edit_tensors(copies.quantised, to_bfloat16)
    found = weight_of(copies.quantised, "model.layers.0.mlp.gate_proj", 48, 32)
    codes = (before / scale.repeat_interleave(16, dim=1)).round()
    rounded = codes * scale.bfloat16().float().repeat_interleave(16, dim=1)
    torch.testing.assert_close(found, rounded, atol=1e-6, rtol=1e-5)
