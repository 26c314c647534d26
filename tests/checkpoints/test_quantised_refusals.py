"""What a config says of quantised weights that is not built here is refused by name, and each tensor must be what the
config asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import read_quantization
from dflash_backend.checkpoints.quantization.kept import have_one_order
from dflash_backend.checkpoints.quantization.names import make_names
from dflash_backend.engine.inspection import inspect_target
from dflash_backend.models import load_target
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Copies,
    Packer,
    Tensors,
    awq,
    edit_config,
    edit_tensors,
    fp8_block,
    gptq,
    write,
)
from tests.support.tiny_models import make_draft, make_target

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}


def weights(**changes: Any) -> dict[str, Any]:
    """`PACKED` with other arguments of its weights."""
    return PACKED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4 | changes}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "'quant_method' is 'bitsandbytes'.*one of fp8, .*other quantised weights"),
        ({"quant_method": "mxfp4"}, "Take a checkpoint of the same model in FP8, in INT4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'quant_method' is 'modelopt'"),
        ({"quant_method": "gguf"}, "'quant_method' is 'gguf'"),
        ({"bits": 4}, "'quant_method' is missing"),
        (FP8_BLOCK | {"fmt": "e5m2"}, "'fmt' is 'e5m2'; expected 'e4m3'"),
        (FP8_BLOCK | {"weight_block_size": [128]}, "'weight_block_size' is .*two sizes"),
        (GPTQ | {"bits": 3}, "'bits' is 3; expected 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'; expected one of gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "repacked weights are not supported"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 9}}}, "dynamic: .*'bits' is 9"),
        (GPTQ | {"dynamic": {"+:(a+)+b": {"bits": 8}}}, "none of them of a group"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"pack_dtype": "int16"}}}, "'pack_dtype' is 'int16'"),
        (AWQ | {"version": "gemv"}, "'version' is 'gemv'; expected 'gemm'"),
        (AWQ | {"checkpoint_format": "gemv_fast"}, "'checkpoint_format' is 'gemv_fast'; expected 'gemm'"),
        (FP8_BLOCK | {"kv_cache_scheme": "static"}, "scales of a KV cache in the files are not supported"),
        (AWQ | {"zero_point": False}, "AWQ without zero points"),
        (AWQ | {"bits": 8}, "'bits' is 8; expected 4"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'.*Take a checkpoint"),
        (PACKED | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (PACKED | {"format": "dense"}, "format is 'dense'"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "scales of a KV cache in the files are not supported"),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "transforms of the weights"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
        (PACKED | {"config_groups": {"W4A16": ["Linear"]}}, "preset names"),
        (PACKED | {"config_groups": {"g": {"targets": ["Embedding"], "weights": INT4}}}, "embeddings stay"),
        (weights(num_bits=3), "'num_bits' is 3; expected 4 or 8"),
        (weights(type="float"), "'type' is 'float'"),
        (weights(strategy="tensor_group"), "'strategy' is 'tensor_group'; expected one of tensor"),
        (weights(strategy="block", block_structure="128x"), "'block_structure' is '128x'; expected two sizes"),
        (weights(strategy="tensor", symmetric=False), "zero points for integers in groups or rows"),
        (weights(actorder="random"), "'actorder' is 'random'"),
        (PACKED | {"ignore": ["re:("]}, r"regular expressions behind 're:'; 're:\(' is none"),
        (PACKED | {"ignore": ["re:(a+)+b"]}, "none of them of a group"),
        (PACKED | {"ignore": ["re:" + ".*" * 9]}, "at most 5 repeats"),
        (PACKED | {"ignore": ["re:" + "(a|b)" * 30]}, "at most 5 repeats"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    make_target(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_target(tmp_path)
    assert "config.json" in str(caught.value)


def test_patterns_that_are_allowed_are_quick() -> None:
    names = make_names(
        JsonReader({}, "c"), "ignore", ["re:" + ".*" * 5 + "#", "re:.*(q|k|v)_proj$", "model.layers.1.mlp.gate"]
    )
    start = time.monotonic()
    assert "model.layers.10.mlp.experts.127.down_proj.aaaaaaaa" not in names
    assert time.monotonic() - start < 1.0
    assert "model.layers.3.self_attn.k_proj" in names
    assert "model.layers.1.mlp.gate" in names
    assert "model.layers.1.mlp.gate.x" not in names


def test_lists_of_the_published_formats_mean_modules_and_ends_of_names() -> None:
    names = make_names(
        JsonReader({}, "c"), "modules_to_not_convert", ["lm_head", "mlp.gate", "model.layers.1"], parts=True
    )
    for name in ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj"):
        assert name in names
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.10.mlp.up_proj"):
        assert name not in names


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A sound checkpoint in FP8."""
    make_target(tmp_path / "source", tie_word_embeddings=False)
    config = FP8_BLOCK | {"modules_to_not_convert": ["lm_head"]}
    return write(tmp_path / "source", tmp_path, fp8_block(), config).quantised


NAME = "model.layers.2.mlp.up_proj"


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def change(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.pop(f"{NAME}.weight_scale_inv"), f"tensor '{NAME}.weight_scale_inv' is missing"),
        (lambda t: t.pop(f"{NAME}.weight"), f"tensor '{NAME}.weight' is missing"),
        (
            change(f"{NAME}.weight_scale_inv", lambda s: s.repeat(2, 1)),
            r"shape \[2, 1\]; config.json asks for \[1, 1\]",
        ),
        (change(f"{NAME}.weight_scale_inv", lambda s: s.int()), "is I32; expected one of F32, BF16, F16"),
        (change(f"{NAME}.weight", lambda w: w.view(torch.int8)), "is I8; expected one of F8_E4M3"),
        (change(f"{NAME}.weight", lambda w: w.T), r"shape \[32, 48\]; config.json asks for \[48, 32\]"),
        (change(f"{NAME}.weight", lambda w: w.float()), f"'{NAME}.weight_scale_inv' of shape .* is not part of this"),
        (change(f"{NAME}.weight_scale_inv", lambda s: s * torch.nan), f"'{NAME}' has numbers that are not finite"),
        (rename(f"{NAME}.weight_scale_inv", f"{NAME}.scales"), f"'{NAME}.scales' .* is not part of this model"),
        (
            lambda t: t.update(
                {
                    "lm_head.weight_scale_inv": torch.ones(1, 1),
                    "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn),
                }
            ),
            "'lm_head' is not quantised|'lm_head.weight' is F8_E4M3",
        ),
    ],
)
def test_a_part_that_is_not_as_the_config_asks_is_named(fp8: Path, edit: Any, expected: str) -> None:
    edit_tensors(fp8, edit)
    with pytest.raises(CheckpointError, match=expected):
        load_target(read_target(fp8), 64, torch.float32, torch.device("cpu"))


def test_inspect_checks_the_parts_without_reading_them(fp8: Path) -> None:
    inspect_target(read_target(fp8))
    edit_tensors(fp8, lambda tensors: tensors.pop(f"{NAME}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match="weight_scale_inv' is missing"):
        inspect_target(read_target(fp8))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t[f"{NAME}.g_idx"].fill_(7), f"'{NAME}' puts columns in groups that are not from 0 to 1"),
        (lambda t: t[f"{NAME}.g_idx"].fill_(-1), "not from 0 to 1"),
        (lambda t: t.update({f"{NAME}.bias": torch.ones(48)}), f"'{NAME}' has a bias beside it"),
        (
            lambda t: t.update({f"{NAME}.weight": torch.ones(48, 32)}),
            f"'{NAME}.(qweight|g_idx|qzeros|scales)' .*not part",
        ),
        (lambda t: t.pop(f"{NAME}.qzeros"), f"'{NAME}.qzeros' is missing"),
    ],
)
def test_parts_of_gptq_that_contradict_the_model(tmp_path: Path, edit: Any, expected: str) -> None:
    make_target(tmp_path / "source")
    copies = write(tmp_path / "source", tmp_path, gptq(), GPTQ)
    edit_tensors(copies.quantised, edit)
    with pytest.raises(CheckpointError, match=expected):
        load_target(read_target(copies.quantised), 64, torch.float32, torch.device("cpu"))


def test_biases_of_zeros_that_autogptq_adds_are_no_part_of_the_model(tmp_path: Path) -> None:
    make_target(tmp_path / "source")
    copies = write(tmp_path / "source", tmp_path, gptq(), GPTQ)
    edit_tensors(copies.quantised, lambda tensors: tensors.update({f"{NAME}.bias": torch.zeros(48)}))
    load_target(read_target(copies.quantised), 64, torch.float32, torch.device("cpu"))


def awq_copies(tmp_path: Path, **changes: Any) -> Copies:
    make_target(tmp_path / "source")
    return write(tmp_path / "source", tmp_path, awq(), AWQ | changes)


def test_a_projection_that_is_listed_as_not_converted_must_not_be(tmp_path: Path) -> None:
    copies = awq_copies(tmp_path, modules_to_not_convert=["up_proj"])
    with pytest.raises(CheckpointError, match=r"up_proj\.q.*is not part of this model: by .* is not quantised"):
        inspect_target(read_target(copies.quantised))


def test_quantised_tensors_without_a_config_and_a_config_without_them(tmp_path: Path) -> None:
    copies = awq_copies(tmp_path)
    edit_config(copies.quantised, quantization_config=None)
    with pytest.raises(CheckpointError, match="config.json has no quantization_config that says how to read it"):
        inspect_target(read_target(copies.quantised))
    edit_config(copies.plain, quantization_config=AWQ)
    with pytest.raises(CheckpointError, match="says that weights are quantised .awq., but none of them is"):
        inspect_target(read_target(copies.plain))


def test_a_plain_weight_that_the_config_calls_quantised_is_named_with_what_it_takes(tmp_path: Path) -> None:
    make_target(tmp_path)
    edit_config(tmp_path, quantization_config=PACKED)
    expected = (
        r"proj.weight' .* not part of this model: by config.json '.*_proj' is quantised, which takes .*weight_packed"
    )
    with pytest.raises(CheckpointError, match=expected):
        inspect_target(read_target(tmp_path))


@pytest.mark.parametrize(("packer", "config"), [(gptq(), GPTQ), (awq(), AWQ)])
def test_heads_are_held_to_quantised_projections_before_anything_is_sized_by_them(
    tmp_path: Path, packer: Packer, config: dict[str, Any]
) -> None:
    make_target(tmp_path / "source")
    copies = write(tmp_path / "source", tmp_path, packer, config)
    edit_config(copies.quantised, num_attention_heads=8)
    with pytest.raises(
        CheckpointError, match=r"q_proj.scales' has shape \[2, 64\]; the heads in .* ask for 128 columns"
    ):
        read_target(copies.quantised)


def test_a_shape_that_words_cannot_hold_is_refused(tmp_path: Path) -> None:
    copies = awq_copies(tmp_path)
    edit_config(copies.quantised, intermediate_size=47)
    with pytest.raises(CheckpointError, match=r"weight of shape \[47, 32\], which AWQ in 4 bits cannot hold"):
        inspect_target(read_target(copies.quantised))


@pytest.mark.parametrize("field", ["dflash_config", "eagle_config"])
def test_only_the_configs_own_word_counts(tmp_path: Path, field: str) -> None:
    from dflash_backend.drafters.registry import read_draft
    from tests.drafters.drafts import make_eagle3

    nested = {"mask_token_id": 96, "target_layer_ids": [1, 3], "quantization_config": AWQ}
    if field == "dflash_config":
        make_draft(tmp_path, dflash_config=nested)
    else:
        make_eagle3(tmp_path, eagle_config={"quantization_config": AWQ})
    with pytest.raises(CheckpointError, match=f"{field}: field 'quantization_config' is not read here"):
        read_draft(tmp_path)


def test_the_experts_of_gpt_oss_are_left_to_their_family() -> None:
    data = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    assert read_quantization(JsonReader(data, "c")) is None


def test_groups_of_a_damaged_file_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a count for each number up to the largest")

    monkeypatch.setattr(torch.Tensor, "bincount", refuse)
    for group in (2, 2**31 - 1, -1):
        groups = torch.zeros(64, dtype=torch.int32)
        groups[5] = group
        assert not have_one_order([groups], 32, ordered=True)
