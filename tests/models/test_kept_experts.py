"""Experts that stay quantised: in which models they do, and that these compute what the same checkpoint computes once
it is dequantised. Kernels run on a GPU, else under Triton's interpreter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.at_load import made_fp8_bytes
from dflash_backend.checkpoints.quantization.keepable import kept_bytes
from dflash_backend.models import TargetModel, load_target
from dflash_backend.models.decoder import DecoderTarget, Gemma4Target
from dflash_backend.models.gemma4 import Gemma4Experts
from dflash_backend.models.hybrid_layers import DeltaNetLayerWeights
from dflash_backend.models.layers import LayerWeights
from dflash_backend.models.linear import Linear, QuantisedLinear
from dflash_backend.models.mlp import SharedExpertMlp, SparseMlp
from dflash_backend.models.ops import LayerOps
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.target import load_shard
from dflash_kernels.quantised_weight import FP8, INT4, INT8, MXFP4, QuantisedWeight
from tests.models.test_kept_weights import (
    CT_INT4,
    CT_INT8,
    DEVICE,
    FORMATS,
    KERNELS,
    MAX_POSITIONS,
    NUM_TOKENS,
    TORCH,
    assert_same,
)
from tests.models.test_text_parts import stack_experts
from tests.oracle.compressed_tensors_library import config, library
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.paged import block_tables, caches, context, noisy_pool
from tests.support.quantised import (
    FP8_BLOCK,
    GPTQ,
    Packer,
    edit_tensors,
    fp8_block,
    fp8_rows,
    gptq,
    is_projection,
    write,
    write_by_name,
)
from tests.support.scale import by_night, others_by_night
from tests.support.tiny_models import GEMMA4_EXPERTS, VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
MOE = "Qwen3MoeForCausalLM"
HIDDEN, INNER, LAYERS, EXPERTS = 192, 64, 2, 6
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 320,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": 104,
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
}
UNQUANTISED = ["lm_head", "re:.*mlp[.]gate$"]
# 64 rows of an expert are two blocks, or a part of one.
SMALL_BLOCKS = {"weight_block_size": [32, 32]}
ONE_ORDER = {name: each for name, each in FORMATS.items() if "order" not in name}
OF_EXPERTS = ONE_ORDER | {"fp8 in small blocks": (fp8_block(32, 32), FP8_BLOCK | SMALL_BLOCKS, FP8)}
# Codes and scales of each kind; that the others are read as well test_kept_weights.py shows by day.
BY_DAY = ("fp8 in small blocks", "fbgemm fp8", "awq", "pack-quantized", "gptq of 8 bits")


def load(directory: Path, ops: LayerOps = KERNELS, **options: Any) -> TargetModel:
    return load_target(read_target(directory), MAX_POSITIONS, torch.float32, DEVICE, ops=ops, **options)


def logits(target: TargetModel) -> torch.Tensor:
    """Of the first tokens of some text: `[n, vocab_size]`."""
    decoder = target.spec.decoder
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pool = noisy_pool(decoder, device=DEVICE.type)
    paged = context(block_tables(1), [0], [NUM_TOKENS], device=DEVICE.type, pool=pool)
    return target.logits(target.forward(ids, paged, caches(decoder, device=DEVICE.type), ()).hidden)


def layers_of(target: TargetModel) -> list[LayerWeights | DeltaNetLayerWeights]:
    """The weights of all layers."""
    assert isinstance(target, DecoderTarget)
    return [layer.weights for layer in target.layers]


def experts(target: TargetModel) -> list[SparseMlp | Gemma4Experts]:
    """Those of all layers."""
    found: list[SparseMlp | Gemma4Experts] = []
    assert isinstance(target, DecoderTarget | Gemma4Target)
    for layer in target.layers:
        own = layer.weights.experts if isinstance(target, Gemma4Target) else layer.weights.mlp
        own = own.sparse if isinstance(own, SharedExpertMlp) else own
        assert isinstance(own, SparseMlp | Gemma4Experts)
        found.append(own)
    return found


def assert_kept(kept: TargetModel, plain: TargetModel, kinds: tuple[str, str]) -> None:
    """All experts stay quantised, as `kinds` into them and out of them, have their own numbers and give the logits of
    these."""
    for own, other in zip(experts(kept), experts(plain), strict=True):
        weights = (own.gate_up, other.gate_up), (own.down, other.down)
        for (weight, numbers), kind in zip(weights, kinds, strict=True):
            assert isinstance(weight, QuantisedWeight)
            assert isinstance(numbers, torch.Tensor)
            assert weight.kind == kind
            assert torch.equal(weight.dequantised(torch.float32).view(numbers.shape), numbers)
    assert_same(logits(kept), logits(plain))


def assert_dequantised(kept: TargetModel, plain: TargetModel, layers: list[int]) -> None:
    """The experts of `layers` alone are numbers."""
    numbers = [isinstance(each.gate_up, torch.Tensor) and isinstance(each.down, torch.Tensor) for each in experts(kept)]
    assert numbers == [index in layers for index in range(len(numbers))]
    assert_same(logits(kept), logits(plain))


def make(tmp_path: Path, packer: Packer, fields: dict[str, Any], architecture: str = MOE, **changes: Any) -> Path:
    make_target(tmp_path / "source", architecture=architecture, **SIZES | changes)
    if "ignore" in fields:
        fields = fields | {"ignore": UNQUANTISED}
    return write(tmp_path / "source", tmp_path, packer, fields).quantised


def pack_all_but(packer: Packer, pattern: str, other: Packer | None) -> Callable[[str], Packer | None]:
    """Packs projections by `packer`, and those whose names match by `other`."""

    def pack(name: str) -> Packer | None:
        return None if not is_projection(name) else other if re.search(pattern, name) else packer

    return pack


@pytest.mark.parametrize("name", others_by_night(OF_EXPERTS, BY_DAY))
def test_experts_keep_their_codes_and_give_the_logits_of_their_numbers(tmp_path: Path, name: str) -> None:
    packer, fields, kind = OF_EXPERTS[name]
    directory = make(tmp_path, packer, fields)
    assert_kept(load(directory), load(directory, TORCH), (kind, kind))


def write_hybrid(tmp_path: Path, architecture: str, name: str, left: str) -> Path:
    """A hybrid whose projections are packed in a format, but for those whose names match `left`."""
    packer, fields, _ = FORMATS[name]
    make_target(tmp_path / "source", architecture=architecture, **SIZES | HYBRID)

    def pack(tensor: str) -> Packer | None:
        wanted = tensor.endswith("_proj.weight") or "linear_attn.in_proj" in tensor
        return packer if wanted and not re.search(left, tensor) else None

    return write_by_name(tmp_path / "source", tmp_path, pack, fields).quantised


def dense_products(layer: LayerWeights | DeltaNetLayerWeights) -> list[Linear]:
    """The products of a layer of a hybrid, but for its experts and small gates."""
    assert isinstance(layer.mlp, SharedExpertMlp)
    shared = [layer.mlp.shared.gate_up, layer.mlp.shared.down]
    if isinstance(layer, LayerWeights):
        return [layer.qkv, layer.output, *shared]
    return [layer.net.inputs[0], layer.net.output, *shared]


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", by_night("Qwen3_5MoeForCausalLM")])
@pytest.mark.parametrize("name", ["fp8 in blocks", by_night("awq")])
def test_a_hybrid_keeps_its_codes_in_all_but_small_gates(tmp_path: Path, architecture: str, name: str) -> None:
    directory = write_hybrid(tmp_path, architecture, name, "in_proj_(ba|b|a)[.]")
    kept, plain = load(directory), load(directory, TORCH)
    assert_kept(kept, plain, (FORMATS[name][2],) * 2)
    num_bytes = bytes_of_experts(kept)
    for own, other in zip(layers_of(kept), layers_of(plain), strict=True):
        for product, numbers in zip(dense_products(own), dense_products(other), strict=True):
            assert isinstance(product, QuantisedLinear)
            # As numbers, what comes out of small gates is part of the product into a delta net.
            assert torch.equal(product.weight, numbers.weight[: product.out_features])
            num_bytes += product.quantised.num_bytes
    # Rows of a block that change places have a scale each.
    found, _ = kept_bytes(read_headers(directory), load_quantization(directory))
    assert found == pytest.approx(num_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("architecture", "left", "kinds"),
    [
        ("Qwen3NextForCausalLM", "nothing", [QuantisedLinear, Linear]),
        by_night("Qwen3NextForCausalLM", "in_proj_qkvz", [Linear]),
        by_night("Qwen3_5MoeForCausalLM", "nothing", [QuantisedLinear, Linear]),
        ("Qwen3_5MoeForCausalLM", "in_proj_z", [Linear]),
    ],
)
def test_small_gates_of_a_delta_net_are_numbers_and_so_is_all_of_it_where_a_part_is(
    tmp_path: Path, architecture: str, left: str, kinds: list[type[Linear]]
) -> None:
    directory = write_hybrid(tmp_path, architecture, "fp8 in blocks", left)
    kept = load(directory)
    net = layers_of(kept)[0]
    assert isinstance(net, DeltaNetLayerWeights)
    assert [type(each) for each in net.net.inputs] == kinds
    assert_same(logits(kept), logits(load(directory, TORCH)))


def test_projections_into_and_out_of_experts_may_be_of_two_schemes(tmp_path: Path) -> None:
    groups = {
        "one": {"targets": ["Linear"], "weights": CT_INT4, "format": "pack-quantized"},
        "two": {"targets": ["re:.*down_proj$"], "weights": CT_INT8, "format": "int-quantized"},
    }
    make_target(tmp_path / "source", architecture=MOE, **SIZES)
    pack = pack_all_but(library("pack-quantized", CT_INT4), "down_proj", library("int-quantized", CT_INT8))
    fields = config("mixed-precision", {}, config_groups=groups, ignore=UNQUANTISED)
    directory = write_by_name(tmp_path / "source", tmp_path, pack, fields).quantised
    kept = load(directory)
    assert_kept(kept, load(directory, TORCH), (INT4, INT8))
    # Scales of the library are in float32 here.
    assert_sizes_are_known(directory, kept, within=0.1)


@pytest.mark.parametrize("left", ["up_proj", by_night("down_proj")])
def test_experts_of_which_one_is_not_quantised_are_dequantised_in_its_layer_alone(tmp_path: Path, left: str) -> None:
    make_target(tmp_path / "source", architecture=MOE, **SIZES)
    pack = pack_all_but(fp8_block(), rf"layers\.1\..*experts\.3\.{left}", None)
    directory = write_by_name(tmp_path / "source", tmp_path, pack, FP8_BLOCK).quantised
    kept = load(directory)
    assert_dequantised(kept, load(directory, TORCH), [1])
    assert_sizes_are_known(directory, kept)


def test_experts_of_unlike_schemes_are_dequantised_in_their_layer_alone(tmp_path: Path) -> None:
    groups = {
        "one": {"targets": ["Linear"], "weights": CT_INT4, "format": "pack-quantized"},
        "two": {
            "targets": ["re:.*layers[.]0[.].*experts[.]2[.]gate_proj$"],
            "weights": CT_INT8,
            "format": "int-quantized",
        },
    }
    make_target(tmp_path / "source", architecture=MOE, **SIZES)
    other = library("int-quantized", CT_INT8)
    pack = pack_all_but(library("pack-quantized", CT_INT4), r"layers\.0\..*experts\.2\.gate_proj", other)
    fields = config("mixed-precision", {}, config_groups=groups, ignore=UNQUANTISED)
    directory = write_by_name(tmp_path / "source", tmp_path, pack, fields).quantised
    kept = load(directory)
    assert_dequantised(kept, load(directory, TORCH), [0])
    # Scales of the library are in float32 here.
    assert_sizes_are_known(directory, kept, within=0.1)


def test_experts_with_columns_in_an_order_of_their_own_are_dequantised(tmp_path: Path) -> None:
    directory = make(tmp_path, gptq(group=32, shuffled=True), GPTQ | {"group_size": 32, "desc_act": True})
    kept = load(directory)
    assert_dequantised(kept, load(directory, TORCH), [0, 1])
    assert_sizes_are_known(directory, kept)


def test_a_rank_of_a_shared_target_dequantises_its_part_of_the_experts(tmp_path: Path) -> None:
    directory = make(tmp_path, fp8_block(), FP8_BLOCK)
    spec, shard = read_target(directory), Shard(0, 2)
    part = load_shard(spec, shard, lambda x: x, MAX_POSITIONS, torch.float32, DEVICE, ops=KERNELS)
    assert isinstance(part, DecoderTarget)
    for layer in part.layers:
        own = layer.weights.mlp.part
        assert isinstance(own, SparseMlp)
        assert isinstance(own.gate_up, torch.Tensor)
        assert own.gate_up.shape == (EXPERTS, INNER, HIDDEN)


@pytest.mark.parametrize("stacked", [by_night(False), True])
def test_fp8_made_at_load_keeps_the_codes_of_experts(tmp_path: Path, stacked: bool) -> None:
    make_target(tmp_path, architecture="Qwen3_5MoeForCausalLM", **SIZES | HYBRID)
    if stacked:
        save_file(stack_experts(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    assert read_target(tmp_path).decoder.moe.stacked == stacked
    kept = load(tmp_path, fp8=True)
    assert_kept(kept, load(tmp_path, TORCH, fp8=True), (FP8, FP8))
    of_experts = {name: header for name, header in read_headers(tmp_path).items() if ".experts." in name}
    numbers = LAYERS * EXPERTS * 3 * INNER * HIDDEN
    assert made_fp8_bytes(of_experts) == (bytes_of_experts(kept), numbers)
    assert bytes_of_experts(kept) == numbers + 4 * LAYERS * EXPERTS * (2 * INNER + HIDDEN)


def test_experts_in_mxfp4_keep_their_codes_and_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path)
    kept, plain = load(tmp_path), load(tmp_path, TORCH)
    assert_kept(kept, plain, (MXFP4, MXFP4))
    num_bytes, numbers = kept_bytes(read_headers(tmp_path), load_quantization(tmp_path))
    assert num_bytes == bytes_of_experts(kept)
    assert numbers == sum(math.prod(each.shape) for own in experts(kept) for each in (own.gate_up, own.down))


def test_a_scale_of_kept_mxfp4_that_is_no_number_is_refused_by_its_experts_name(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    edit_tensors(tmp_path, lambda tensors: tensors[name][3].view(-1)[5].fill_(255))
    with pytest.raises(CheckpointError, match=rf"{name}', expert 3: .* 255, which is not a number"):
        load(tmp_path)


def test_fp8_made_at_load_keeps_the_codes_of_gemma_4s_experts(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="Gemma4ForCausalLM", **GEMMA4_EXPERTS)
    kept = load(tmp_path, fp8=True)
    assert isinstance(kept, Gemma4Target)
    assert_kept(kept, load(tmp_path, TORCH, fp8=True), (FP8, FP8))


@pytest.mark.parametrize("name", ["awq", by_night("fp8 in blocks")])
def test_experts_of_gemma_4_that_are_quantised_one_by_one_keep_their_codes(tmp_path: Path, name: str) -> None:
    """Plain ones are a tensor of all of a layer; tools quantise each by itself."""
    packer, fields, kind = FORMATS[name]
    make_target(tmp_path / "source", architecture="Gemma4ForCausalLM", **GEMMA4_EXPERTS | {"moe_intermediate_size": 64})
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    for stacked in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        layer = stacked.rpartition(".")[0]
        for expert, matrix in enumerate(tensors.pop(stacked)):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, rows in (parts if "gate_up" in stacked else {"down_proj": matrix}).items():
                tensors[f"{layer}.{expert}.{part}.weight"] = rows.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    directory = write_by_name(
        tmp_path / "source", tmp_path, lambda tensor: packer if ".experts." in tensor else None, fields
    ).quantised
    kept = load(directory)
    assert_kept(kept, load(directory, TORCH), (kind, kind))


def bytes_of_experts(target: TargetModel) -> int:
    """What experts that stay quantised take in memory."""
    weights = [each for own in experts(target) for each in (own.gate_up, own.down)]
    return sum(each.num_bytes for each in weights if isinstance(each, QuantisedWeight))


def assert_sizes_are_known(directory: Path, kept: TargetModel, within: float = 0.0) -> None:
    """By the headers of experts alone."""
    headers = {name: header for name, header in read_headers(directory).items() if ".experts." in name}
    found, numbers = kept_bytes(headers, load_quantization(directory))
    assert found == pytest.approx(bytes_of_experts(kept), rel=within)
    layers = sum(isinstance(own.gate_up, QuantisedWeight) for own in experts(kept))
    assert numbers == layers * EXPERTS * 3 * INNER * HIDDEN


@pytest.mark.parametrize("name", [by_night("fp8 in blocks"), "fp8 in small blocks", "awq", by_night("gptq of 8 bits")])
def test_headers_say_what_experts_take_in_memory(tmp_path: Path, name: str) -> None:
    packer, fields, _ = OF_EXPERTS[name]
    directory = make(tmp_path, packer, fields)
    kept = load(directory)
    assert_sizes_are_known(directory, kept)
    assert sum(each.gate_up.shape[0] for each in experts(kept)) == LAYERS * EXPERTS * 2 * INNER
    assert "100 % of these weights" in dict(target_facts(read_target(directory)))["kept"]


def test_codes_of_one_expert_that_are_no_numbers_are_refused_by_its_name(tmp_path: Path) -> None:
    directory = make(tmp_path, fp8_block(), FP8_BLOCK)
    name = "model.layers.1.mlp.experts.4.up_proj"
    edit_tensors(directory, lambda tensors: tensors[f"{name}.weight"].view(torch.uint8).view(-1)[5].fill_(0xFF))
    with pytest.raises(CheckpointError, match=re.escape(f"'{name}' has numbers that are not finite")):
        load(directory)


def test_experts_that_are_not_quantised_stay_numbers_beside_projections_that_are(tmp_path: Path) -> None:
    make_target(tmp_path / "source", architecture=MOE, **SIZES)
    pack = pack_all_but(fp8_rows, "experts", None)
    fields = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    directory = write_by_name(tmp_path / "source", tmp_path, pack, fields).quantised
    kept = load(directory)
    assert_dequantised(kept, load(directory, TORCH), [0, 1])
    assert isinstance(kept, DecoderTarget)
    assert all(isinstance(layer.weights.qkv, QuantisedLinear) for layer in kept.layers)
