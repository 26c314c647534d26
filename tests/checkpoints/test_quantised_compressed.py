"""Checkpoints that compressed-tensors writes: ours give the logits of the weights that the library itself makes of
them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.apply import apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.quantised import Copies, Packer, Tensors, edit_config, edit_tensors, is_projection, write, write_by_name
from tests.quantised_logits import assert_same_logits, projections, weight_of
from tests.tiny_models import make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
MOE = "Qwen3MoeForCausalLM"
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 272}
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


def limits(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
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
    """What the library makes of a weight, and of that again."""
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
