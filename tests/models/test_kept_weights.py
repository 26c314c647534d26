"""Weights that stay quantised: what keeps its codes in a model of kernels, and that it computes what the same
checkpoint computes once it is dequantised. Kernels run on a GPU, else under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.keepable import kept_bytes
from dflash_backend.drafters.dflash.drafter import DFlashModel
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import TargetModel, load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.linear import Linear, QuantisedLinear
from dflash_backend.models.ops import LayerOps, select_ops
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.target import load_shard
from dflash_kernels.quantised_weight import FP8, INT4, INT8
from tests.models.drafting import load_options
from tests.oracle.compressed_tensors_library import config, library
from tests.support.paged import block_tables, caches, context
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Packer,
    awq,
    edit_config,
    edit_tensors,
    fp8_block,
    fp8_rows,
    fp8_tensor,
    gptq,
    write,
    write_by_name,
)
from tests.support.scale import by_night, others_by_night
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS, TORCH = select_ops(DEVICE, "triton"), select_ops(DEVICE, "torch")
NUM_TOKENS, MAX_POSITIONS = 21, 64
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "intermediate_size": 320,
    "vocab_size": 104,
    "tie_word_embeddings": False,
}
CT_INT8: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
CT_INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 64}

FORMATS: dict[str, tuple[Packer, dict[str, Any], str]] = {
    "fp8 in blocks": (fp8_block(), FP8_BLOCK, FP8),
    "fp8 of a tensor": (fp8_tensor(), {"quant_method": "fp8", "activation_scheme": "static"}, FP8),
    "fbgemm fp8": (fp8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, FP8),
    "gptq": (gptq(group=64), GPTQ | {"group_size": 64}, INT4),
    "gptq v2 in one group": (
        gptq(group=-1, stored_less=0),
        GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
        INT4,
    ),
    "awq": (awq(32), AWQ | {"group_size": 32}, INT4),
    "pack-quantized": (library("pack-quantized", CT_INT4), config("pack-quantized", CT_INT4), INT4),
    "pack-quantized with zero points": (
        library("pack-quantized", CT_INT4 | {"symmetric": False}),
        config("pack-quantized", CT_INT4 | {"symmetric": False}),
        INT4,
    ),
    "gptq, columns in an order of their own": (
        gptq(group=64, shuffled=True),
        GPTQ | {"group_size": 64, "desc_act": True},
        INT4,
    ),
    "gptq, an order that the config does not name": (gptq(group=64, shuffled=True), GPTQ | {"group_size": 64}, INT4),
    "gptq of 8 bits": (gptq(8, group=64), GPTQ | {"bits": 8, "group_size": 64}, INT8),
    "int8 of rows": (library("int-quantized", CT_INT8), config("int-quantized", CT_INT8), INT8),
    "int8 of tensors with zero points": (
        library("int-quantized", CT_INT8 | {"strategy": "tensor", "symmetric": False}),
        config("int-quantized", CT_INT8 | {"strategy": "tensor", "symmetric": False}),
        INT8,
    ),
    "pack-quantized of 8 bits": (
        library("pack-quantized", CT_INT4 | {"num_bits": 8}),
        config("pack-quantized", CT_INT4 | {"num_bits": 8}),
        INT8,
    ),
}
# Of each of these there is another form by day.
BY_NIGHT = {"fp8 of a tensor", "gptq", "pack-quantized", "int8 of rows", "gptq, an order that the config does not name"}
# Weights of these stay numbers, as on a CPU.
DEQUANTISED: dict[str, tuple[Packer, dict[str, Any]]] = {
    "groups that no tile is made of": (gptq(), GPTQ),
    "INT8 in groups that no tile is made of": (gptq(8), GPTQ | {"bits": 8}),
    "blocks of odd sizes": (fp8_block(24, 40), FP8_BLOCK | {"weight_block_size": [24, 40]}),
}


def load(directory: Path, ops: LayerOps = KERNELS, **options: Any) -> DecoderTarget:
    target = load_target(read_target(directory), MAX_POSITIONS, torch.float32, DEVICE, ops=ops, **options)
    assert isinstance(target, DecoderTarget)
    return target


def logits(target: TargetModel) -> torch.Tensor:
    """Of the first tokens of some text: `[n, vocab_size]`."""
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    paged = context(block_tables(1), [0], [NUM_TOKENS], device=DEVICE.type)
    kv = caches(target.spec.decoder, device=DEVICE.type)
    return target.logits(target.forward(ids, paged, kv, ()).hidden)


def products(target: DecoderTarget) -> list[Linear]:
    """The products of all layers."""
    weights = [layer.weights for layer in target.layers]
    return [each for w in weights for each in (w.qkv, w.output, w.mlp.gate_up, w.mlp.down)]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits are about 10; sums have another order, and here no weight is rounded."""
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", others_by_night(FORMATS, FORMATS.keys() - BY_NIGHT))
def test_projections_keep_their_codes_and_give_the_logits_of_their_numbers(tmp_path: Path, name: str) -> None:
    packer, fields, kind = FORMATS[name]
    make_target(tmp_path / "source", architecture="Qwen2ForCausalLM", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    kept, plain = load(directory), load(directory, TORCH)
    assert all(isinstance(each, QuantisedLinear) and each.quantised.kind == kind for each in products(kept))
    assert not any(isinstance(each, QuantisedLinear) for each in products(plain))
    for own, other in zip(products(kept), products(plain), strict=True):
        assert torch.equal(own.weight, other.weight)
    assert_same(logits(kept), logits(plain))


@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_no_product_is_there_for_is_dequantised(tmp_path: Path, name: str) -> None:
    packer, fields = DEQUANTISED[name]
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    kept, plain = load(directory), load(directory, TORCH)
    # An output projection here has one group, which any order is that of.
    wide = [each for each in products(kept) if each.in_features > 64]
    assert len(wide) == 3 * len(kept.layers)
    assert not any(isinstance(each, QuantisedLinear) for each in wide)
    assert_same(logits(kept), logits(plain))


@pytest.mark.parametrize("uneven", [False, True])
def test_projections_of_several_orders_are_dequantised_where_they_are_one_product(tmp_path: Path, uneven: bool) -> None:
    """And so is a weight that has groups of more columns than others."""
    make_target(tmp_path / "source", **SIZES)
    packer, fields = gptq(group=64, shuffled=True), GPTQ | {"group_size": 64, "desc_act": True}
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            groups = tensors[f"model.layers.{layer}.self_attn.k_proj.g_idx"]
            if uneven:
                groups.fill_(1)
                for name in ("q_proj", "v_proj"):
                    tensors[f"model.layers.{layer}.self_attn.{name}.g_idx"].fill_(1)
            else:
                groups.copy_(groups.flip(0))

    edit_tensors(directory, change)
    kept, plain = load(directory), load(directory, TORCH)
    assert [isinstance(each, QuantisedLinear) for each in products(kept)] == [False, True, True, True] * 2
    assert_same(logits(kept), logits(plain))


def test_rows_of_a_weight_with_columns_in_an_order_keep_it(tmp_path: Path) -> None:
    packer, fields, _ = FORMATS["gptq, columns in an order of their own"]
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    kept, plain = (load(directory, ops).layers[0].weights.qkv for ops in (KERNELS, TORCH))
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for index in (slice(16, 48), torch.tensor([9, 3, 70], device=DEVICE)):
        assert_same(kept.rows(index)(x), plain(x)[:, index])
    assert_same(Linear.stacked([kept, kept])(x), torch.cat([plain(x)] * 2, dim=1))


def test_projections_of_several_schemes_are_dequantised_where_they_are_one_product(tmp_path: Path) -> None:
    """Queries stay as they are, so the three are numbers; the output keeps its codes."""
    make_target(tmp_path / "source", **SIZES)

    def pack(name: str) -> Packer | None:
        return fp8_block() if name.endswith("_proj.weight") and "q_proj" not in name else None

    directory = write_by_name(tmp_path / "source", tmp_path, pack, FP8_BLOCK).quantised
    kept, plain = load(directory), load(directory, TORCH)
    kinds = [isinstance(each, QuantisedLinear) for each in products(kept)]
    assert kinds == [False, True, True, True] * len(kept.layers)
    assert_same(logits(kept), logits(plain))


def test_a_head_keeps_its_codes_and_gives_some_of_its_rows_to_a_drafter(tmp_path: Path) -> None:
    make_target(tmp_path / "source", **SIZES)

    def pack(name: str) -> Packer | None:
        return awq(64) if name.endswith("_proj.weight") or name == "lm_head.weight" else None

    directory = write_by_name(tmp_path / "source", tmp_path, pack, AWQ | {"group_size": 64}).quantised
    kept, plain = load(directory), load(directory, TORCH)
    assert isinstance(kept.lm_head, QuantisedLinear)
    assert_same(logits(kept), logits(plain))
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids = torch.tensor([9, 100, 3], device=DEVICE)
    assert_same(kept.lm_head.rows(ids)(x), plain.lm_head(x)[:, ids])


def test_a_drafter_keeps_its_codes_and_those_of_its_context_kv(tmp_path: Path) -> None:
    make_draft(tmp_path / "source")
    directory = write(tmp_path / "source", tmp_path, fp8_block(32, 32), FP8_BLOCK | {"weight_block_size": [32, 32]})
    kept, plain = (
        DFlashModel.load(read_draft(directory.quantised), load_options(MAX_POSITIONS, device=DEVICE, ops=ops))
        for ops in (KERNELS, TORCH)
    )
    assert isinstance(kept.context_kv, QuantisedLinear)
    assert not isinstance(plain.context_kv, QuantisedLinear)
    assert torch.equal(kept.context_kv.weight, plain.context_kv.weight)
    x = torch.randn(5, kept.context_kv.in_features, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert_same(kept.context_kv(x), plain.context_kv(x))


def test_fp8_made_at_load_keeps_its_codes(tmp_path: Path) -> None:
    make_target(tmp_path, **SIZES)
    kept, plain = load(tmp_path, fp8=True), load(tmp_path, TORCH, fp8=True)
    assert all(isinstance(each, QuantisedLinear) for each in products(kept))
    assert not isinstance(kept.lm_head, QuantisedLinear)
    for own, other in zip(products(kept), products(plain), strict=True):
        assert torch.equal(own.weight, other.weight)
    assert_same(logits(kept), logits(plain))


def test_a_rank_of_a_shared_target_dequantises_its_part(tmp_path: Path) -> None:
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, fp8_block(), FP8_BLOCK).quantised
    shard = Shard(0, 2)
    part = load_shard(read_target(directory), shard, lambda x: x, MAX_POSITIONS, torch.float32, DEVICE, ops=KERNELS)
    assert isinstance(part, DecoderTarget)
    assert not any(isinstance(layer.weights.qkv, QuantisedLinear) for layer in part.layers)


@pytest.mark.parametrize(
    "name",
    [
        "fp8 in blocks",
        "gptq, columns in an order of their own",
        by_night("awq"),
        "pack-quantized",
        by_night("gptq of 8 bits"),
    ],
)
def test_headers_say_what_the_weights_take_in_memory(tmp_path: Path, name: str) -> None:
    packer, fields, _ = FORMATS[name]
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    found, numbers = kept_bytes(read_headers(directory), load_quantization(directory))
    kept = [each for each in products(load(directory)) if isinstance(each, QuantisedLinear)]
    assert numbers == sum(each.in_features * each.out_features for each in kept)
    # Fused blocks that are cut have a scale for each row; scales of the library are in float32 here.
    assert found == pytest.approx(sum(each.quantised.num_bytes for each in kept), rel=0.1)


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [("fp8 in blocks", "down_proj.weight_scale_inv", float("nan")), ("gptq", "down_proj.scales", float("inf"))],
)
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, name: str, tensor: str, value: float) -> None:
    packer, fields, _ = FORMATS[name]
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    edit_tensors(directory, lambda tensors: tensors[f"model.layers.0.mlp.{tensor}"].view(-1)[1].fill_(value))
    with pytest.raises(CheckpointError, match=r"down_proj' has numbers that are not finite"):
        load(directory)


def test_codes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, fp8_block(), FP8_BLOCK).quantised
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(directory, lambda tensors: tensors[name].view(torch.uint8).view(-1)[5].fill_(0xFF))
    with pytest.raises(CheckpointError, match=r"down_proj' has numbers that are not finite"):
        load(directory)


def test_a_shape_that_contradicts_the_model_is_refused(tmp_path: Path) -> None:
    packer, fields, _ = FORMATS["pack-quantized"]
    make_target(tmp_path / "source", **SIZES)
    directory = write(tmp_path / "source", tmp_path, packer, fields).quantised
    name = "model.layers.0.mlp.down_proj.weight_shape"
    edit_tensors(directory, lambda tensors: tensors[name].copy_(torch.tensor([320, 192])))
    with pytest.raises(CheckpointError, match="says that its shape is"):
        load(directory)
    edit_config(directory, quantization_config=fields)
