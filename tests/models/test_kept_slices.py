"""Ranks that share a target keep their parts of quantised weights in codes, where products of codes are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import read_target
from dflash_backend.checkpoints.quantization import kept
from dflash_backend.checkpoints.quantization.scheme import Layout, Scheme
from dflash_backend.checkpoints.quantization.slices import Slice, splits_block
from dflash_backend.checkpoints.quantization.stored import Role, StoredWeight
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.linear import Linear, QuantisedLinear
from dflash_backend.models.ops import select_ops
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.target import SummedLinear, load_shard
from dflash_kernels.quantised_weight import FP8, QuantisedWeight
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.quantised import (
    AWQ,
    FP8_BLOCK,
    GPTQ,
    Packer,
    awq,
    fp8_block,
    fp8_rows,
    fp8_tensor,
    gptq,
    is_projection,
    write,
    write_by_name,
)
from tests.support.tiny_models import make_target

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
KERNELS, TORCH = select_ops(CPU, "triton"), select_ops(CPU, "torch")
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}
# Each with whether what leads out of attention and MLP, whose columns ranks share, is kept.
FORMATS: dict[str, tuple[Packer, dict[str, Any], bool]] = {
    "fp8, blocks within a rank": (fp8_block(16, 32), FP8_BLOCK | {"weight_block_size": [16, 32]}, True),
    "fp8, blocks that ranks share": (fp8_block(), FP8_BLOCK, False),
    "fp8, a scale for each row": (fp8_rows, FBGEMM, True),
    "fp8, a scale": (fp8_tensor(), {"quant_method": "fp8", "activation_scheme": "static"}, True),
    "gptq": (gptq(group=32), GPTQ | {"group_size": 32}, True),
    "gptq, columns in an order": (gptq(group=32, shuffled=True), GPTQ | {"group_size": 32, "desc_act": True}, False),
    "awq": (awq(group=32), AWQ | {"group_size": 32}, True),
}


def load(directory: Path, rank: int, ops: Any, lines: list[str] | None = None, fp8: bool = False) -> DecoderTarget:
    """One of two ranks."""
    progress = None if lines is None else lambda line, _: lines.append(line)
    target = load_shard(
        read_target(directory), Shard(rank, 2), lambda x: x, 64, torch.float32, CPU, progress, ops, fp8=fp8
    )
    assert isinstance(target, DecoderTarget)
    return target


def products(target: DecoderTarget) -> Iterator[tuple[str, Linear]]:
    """Those of each layer, by what they are."""
    for layer in target.layers:
        mlp = layer.weights.mlp.part
        yield from (("qkv", layer.weights.qkv), ("gate_up", mlp.gate_up), ("down", mlp.down))
        yield "output", layer.weights.output._part


def is_kept(product: Linear) -> bool:
    return isinstance(product, QuantisedLinear)


@pytest.mark.parametrize("name", FORMATS)
def test_a_ranks_codes_are_those_of_its_numbers(tmp_path: Path, name: str) -> None:
    packer, config, columns_kept = FORMATS[name]
    make_target(tmp_path / "source", num_hidden_layers=1, **SIZES)
    copies = write(tmp_path / "source", tmp_path, packer, config)
    for rank in range(2):
        lines: list[str] = []
        found, plain = load(copies.quantised, rank, KERNELS, lines), load(copies.quantised, rank, TORCH)
        for (kind, product), (_, numbers) in zip(products(found), products(plain), strict=True):
            assert torch.equal(product.weight, numbers.weight)
            if kind in ("down", "output"):
                assert is_kept(product) == columns_kept, kind
            elif name != "fp8, blocks that ranks share":
                assert is_kept(product), kind
            assert not is_kept(numbers)
        assert sum("dequantised whole" in line for line in lines) == (not columns_kept)


def test_fp8_at_load_is_kept_by_ranks_with_the_scales_of_whole_rows(tmp_path: Path) -> None:
    make_target(tmp_path, num_hidden_layers=1, **SIZES)
    for rank in range(2):
        found, plain = load(tmp_path, rank, KERNELS, fp8=True), load(tmp_path, rank, TORCH, fp8=True)
        for (_, product), (_, numbers) in zip(products(found), products(plain), strict=True):
            assert is_kept(product)
            assert torch.equal(product.weight, numbers.weight)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM"])
def test_experts_and_delta_nets_of_a_rank_are_kept(tmp_path: Path, architecture: str) -> None:
    """A rank's rows of a delta net's queries, keys and values lie apart in the file."""
    changes = {"moe_intermediate_size": 64} if architecture.startswith("Qwen3Moe") else {}
    make_target(tmp_path / "source", architecture=architecture, **SIZES | changes)
    copies = write_by_name(
        tmp_path / "source",
        tmp_path,
        lambda name: fp8_rows if is_projection(name) or ".in_proj_qkv" in name or ".in_proj_z" in name else None,
        FBGEMM,
    )
    for rank in range(2):
        found, plain = load(copies.quantised, rank, KERNELS), load(copies.quantised, rank, TORCH)
        for layer, numbers in zip(found.layers, plain.layers, strict=True):
            if hasattr(layer.weights, "net"):
                own, other = layer.weights.net, numbers.weights.net
                assert is_kept(own.inputs[0])
                assert is_kept(own.output._part)
                rows, expected = (torch.cat([each.weight for each in net.inputs]) for net in (own, other))
                assert torch.equal(rows, expected)
            part, of_numbers = layer.weights.mlp.part, numbers.weights.mlp.part
            if isinstance(part.gate_up, QuantisedWeight):
                assert torch.equal(part.gate_up.dequantised(torch.float32), of_numbers.gate_up.flatten(0, 1))
                assert torch.equal(part.down.dequantised(torch.float32), of_numbers.down.flatten(0, 1))
            else:
                assert is_kept(part.down) == (architecture == "Qwen3_5ForCausalLM")


def test_mxfp4_experts_of_a_rank_are_kept(tmp_path: Path) -> None:
    make_mxfp4_target(tmp_path, intermediate_size=64)
    for rank in range(2):
        found, plain = load(tmp_path, rank, KERNELS), load(tmp_path, rank, TORCH)
        own, numbers = found.layers[0].weights.mlp.part, plain.layers[0].weights.mlp.part
        assert isinstance(own.gate_up, QuantisedWeight)
        assert torch.equal(own.gate_up.dequantised(torch.float32), numbers.gate_up.flatten(0, 1))
        assert torch.equal(own.down.dequantised(torch.float32), numbers.down.flatten(0, 1))


def test_a_sum_of_ranks_multiplies_by_codes() -> None:
    codes = torch.arange(32 * 64, dtype=torch.int64).remainder(100).to(torch.uint8).view(32, 64)
    weight = QuantisedWeight(FP8, codes, torch.ones(1, 32), None, 1, 64)
    used: list[object] = []
    part = QuantisedLinear(weight, None, torch.float32, lambda x, each, bias: used.append(each) or x[:, :32])
    summed = SummedLinear(part, lambda x: 2 * x)
    x = torch.ones(3, 64)
    assert torch.equal(summed(x), 2 * x[:, :32])
    assert used == [weight]
    again = summed.with_product(lambda each: lambda x, each, bias: 3 * x[:, :32])
    assert torch.equal(again(x), 6 * x[:, :32])
    assert torch.equal(summed.weight, weight.dequantised(torch.float32))
    assert (summed.in_features, summed.out_features, summed.dtype) == (64, 32, torch.float32)


def test_parts_of_one_weight_have_the_scales_of_their_rows() -> None:
    """Whatever rows a block has where a part ends."""
    codes = torch.zeros(3, 2, dtype=torch.uint8)
    parts = [kept.KeptWeight("int8", codes, torch.tensor([[1.0], [2.0]]) + 2 * i, None, 2, 2) for i in range(2)]
    whole = kept._below_one_another(parts)
    assert whole.scales.flatten().tolist() == [1, 1, 2, 3, 3, 4]
    assert whole.rows == 1


def test_borders_may_lie_between_words_and_blocks_and_at_the_end_of_a_weight_whose_last_ones_are_cut() -> None:
    fp8 = StoredWeight("p", Scheme(Layout.FLOAT8, 8, (32, 32), ("scale",)), {Role.CODES: "c", Role.SCALE: "s"})
    roles = {role: role.name for role in (Role.CODES, Role.SCALE, Role.ZERO)}
    # Eight zero points in a word, each of two rows.
    words = StoredWeight("p", Scheme(Layout.PACKED, 4, (2, 32), ("scale",), symmetric=False), roles)
    of_all = StoredWeight("p", Scheme(Layout.PACKED, 4, (None, 32), ("scale",), symmetric=False), roles)
    for stored, dim, start, stop, expected in (
        (fp8, 0, 0, 80, False),
        (fp8, 0, 64, 80, False),
        (fp8, 0, 0, 64, False),
        (fp8, 0, 0, 48, True),
        (fp8, 0, 48, 80, True),
        (fp8, 1, 96, 112, False),
        (fp8, 1, 0, 16, True),
        (words, 0, 16, 32, False),
        (words, 0, 8, 32, True),
        (words, 0, 0, 40, True),
        (of_all, 0, 0, 64, True),
    ):
        assert splits_block(stored, (80, 112), dim, start, stop) == expected, (stored.scheme.layout, dim, start, stop)


def test_columns_of_a_rank_are_in_groups_of_its_own() -> None:
    scheme = Scheme(Layout.GPTQ, 4, (1, 2), ("scales",), ordered=True)
    stored = StoredWeight("p", scheme, {Role.ORDER: "p.g_idx"})
    groups = torch.tensor([0, 0, 1, 1, 3, 2, 3, 2])
    for taken, expected in (
        (None, groups),
        (Slice(0, (1,), 2), groups),
        (Slice(1, (1,), 2), torch.tensor([1, 0, 1, 0])),
    ):
        width = 4 if taken is not None and taken.dim == 1 else 8
        found = kept.groups_of(stored, lambda name, index: groups[index], (16, width), taken)
        assert found is not None
        assert torch.equal(found, expected)
