"""The C++ operations of a CPU equal their references, and a row's result is its own whatever else is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.gguf.blocks import BITS, BLOCKS
from dflash_kernels import cpu_library, cpu_ops
from dflash_kernels.activation import gelu_mul_reference, silu_mul_reference
from dflash_kernels.argmax import argmax_reference
from dflash_kernels.context_write import context_write_reference
from dflash_kernels.cpu_ops import PackedWeight
from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write_reference
from dflash_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from dflash_kernels.sample import sample_reference
from tests.kernels.inputs import random

needs_library = pytest.mark.skipif(not cpu_ops.HAS_CPU_OPS, reason="needs a C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"atol": 1e-4, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
# Rows, outputs, inputs: a row, a tile and one more, neither of a multiple, more than a tile of each.
SHAPES = [(1, 160, 160), (5, 37, 100), (17, 16, 64), (33, 100, 33), (70, 257, 96), (70, 40, 1500)]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_by_a_packed_weight_is_that_of_float64(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight, bias = (
        random(*shape, seed=i).to(dtype) for i, shape in enumerate([(rows, inputs), (outputs, inputs), (outputs,)])
    )
    packed = PackedWeight(weight)
    for offset in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(packed.product(x, offset), expected.to(dtype), **TOLERANCE[dtype])
    torch.testing.assert_close(packed.product(x[None])[0], packed.product(x), atol=0, rtol=0)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(300, 576), (140, 9000)])
def test_a_row_of_a_product_has_the_same_bits_beside_any_others_and_by_any_threads(
    rows: int, size: int, dtype: torch.dtype
) -> None:
    """Wide ones too, of which a cache holds few."""
    x, packed = random(rows, size).to(dtype), PackedWeight(random(200, size, seed=1).to(dtype))
    before = torch.get_num_threads()
    together = packed.product(x)
    try:
        for threads in (1, 2, 8):  # of eight each one has few of 300 rows, so they take blocks together
            torch.set_num_threads(threads)
            assert torch.equal(packed.product(x), together)
    finally:
        torch.set_num_threads(before)
    for few in (1, 3, 6, 16, 17, 33, 70):
        assert torch.equal(packed.product(x[:few]), together[:few])
    wide = torch.cat([x, x], dim=1)  # rows that lie apart
    assert torch.equal(packed.product(wide[:, size:]), together)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight_are_its_numbers(dtype: torch.dtype) -> None:
    weight = random(50, 33).to(dtype)
    index = torch.tensor([49, 0, 16, 16])
    assert torch.equal(PackedWeight(weight).rows(index), weight[index])
    for row in (50, -1):
        with pytest.raises(IndexError, match=f"row {row} of a weight of 50 rows"):
            PackedWeight(weight).rows(torch.tensor([0, row]))


@needs_library
def test_float32_whose_numbers_are_bfloat16_takes_half_the_memory_and_is_as_exact() -> None:
    """As numbers of float32, which a row that is not of bfloat16 asks for."""
    for outputs, inputs in ((32, 64), (37, 96), (300, 768), (40, 1600), (8, 32)):
        numbers = (0.1 * random(outputs, inputs)).bfloat16().float()
        numbers[-1, ::3] = -0.0
        whole = torch.cat([numbers, torch.full((1, inputs), 0.1)])
        halves, floats = PackedWeight(numbers), PackedWeight(whole)
        assert halves.is_plain
        assert halves.data.nbytes == -(-outputs // 32) * 32 * inputs * 2
        assert floats.data.nbytes == -(-(outputs + 1) // 16) * 16 * inputs * 4
        assert torch.equal(halves.rows(torch.arange(outputs)).view(torch.int32), numbers.view(torch.int32))
        for rows in (1, 2, 6, 7, 12, 13, 18, 19, 25, 70, 600):
            x, bias = random(rows, inputs, seed=1), random(outputs + 1, seed=2)
            x[0, 0], x[-1, -1] = 3.4e38, 1e-30  # in terms of fewer bits none overflows
            by_halves, by_floats = halves.product(x, bias[:-1].clone()), floats.product(x, bias)[:, :-1]
            exact = F.linear(x.double(), numbers.double(), bias[:-1].double())
            size = F.linear(x.double().abs(), numbers.double().abs())
            errors = [((each - exact).abs() / size).max() for each in (by_halves, by_floats)]
            assert errors[0] < max(2 * errors[1], 1e-7)
            alone = torch.cat([halves.product(x[row : row + 1], bias[:-1].clone()) for row in range(rows)])
            assert torch.equal(alone, by_halves)


@needs_library
def test_an_infinite_input_and_one_that_is_no_number_go_into_their_rows_alone() -> None:
    numbers = (random(40, 64).abs() + 1).bfloat16().float()
    for rows in (3, 20):
        x = random(rows, 64, seed=1)
        expected = PackedWeight(numbers).product(x)
        expected[0], expected[1] = float("inf"), float("nan")
        x[0, 5], x[1, 6] = float("inf"), float("nan")
        found = PackedWeight(numbers).product(x)
        assert torch.equal(found[2:], expected[2:])
        assert found[0].isinf().all()
        assert found[1].isnan().all()


@needs_library
def test_one_number_that_is_no_bfloat16_keeps_all_in_float32() -> None:
    for size in (32, 32 * 2048):
        for at in (0, size // 2 - 1, size - 1):
            numbers = torch.ones(size)
            numbers[at] += 2.0**-20
            packed = PackedWeight(numbers.view(-1, 32))
            assert torch.equal(packed.rows(torch.arange(size // 32)).view(-1), numbers)
    # A product reads 32 inputs of bfloat16 at a time, and a row of float32 may end before.
    assert PackedWeight(torch.ones(32, 33)).data.nbytes == 32 * 33 * 4


# Where a block of each type has its numbers in float16.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks_of(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of this type of GGUF, uint8 `[rows, bytes]`, any codes, steps of either sign, and their numbers."""
    numbers, num_bytes, _ = cpu_ops.BLOCKS[kind]
    rng = np.random.default_rng(rows + columns)
    blocks = rng.integers(0, 256, (rows, columns // numbers, num_bytes), np.uint8)
    for at in HALVES[kind]:
        halves = rng.uniform(-1, 1, blocks.shape[:2]) * 2.0 ** rng.integers(-12, 2, blocks.shape[:2])
        blocks[..., at : at + 2] = halves.astype("<f2")[..., None].view("u1")
    raw = blocks.reshape(rows, -1)
    quants, kinds = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf").GGMLQuantizationType
    return torch.from_numpy(raw), torch.from_numpy(quants.dequantize(raw, kinds[kind]))


def product_by(numbers: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """By numbers of blocks, float32, which are rounded to x's type only where pairs of bfloat16 are multiplied."""
    if x.dtype == torch.float32 or cpu_ops.HAS_PAIRS:
        return PackedWeight(numbers.to(x.dtype)).product(x, bias)
    return PackedWeight(numbers).product(x.float(), None if bias is None else bias.float()).to(x.dtype)


def test_types_of_blocks_are_those_of_files() -> None:
    assert cpu_ops.BLOCKS.keys() == BITS.keys()
    assert all(BLOCKS[kind] == (numbers, num_bytes) for kind, (numbers, num_bytes, _) in cpu_ops.BLOCKS.items())


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BITS)
def test_a_weight_in_blocks_has_the_bits_of_its_numbers_in_fewer_bytes(kind: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((64, 768), (89, 1536), (7, 256)):
        raw, numbers = blocks_of(kind, outputs, inputs)
        packed, one = PackedWeight.of_blocks([(kind, raw)], dtype), PackedWeight.of_blocks([(kind, raw[:1])], dtype)
        assert packed is not None
        assert one is not None
        unit = one.data.nbytes * 8 // (inputs * BITS[kind])  # outputs that lie together
        assert unit in ((32,) if dtype == torch.bfloat16 and cpu_ops.HAS_PAIRS else (32, 64))
        assert packed.shape == (outputs, inputs)
        assert packed.data.nbytes * 8 == -(-outputs // unit) * unit * inputs * BITS[kind]
        index = torch.arange(outputs).flip(0)
        assert torch.equal(packed.rows(index), numbers.to(dtype)[index])
        x, bias = random(520, inputs, seed=1).to(dtype), random(outputs, seed=2).to(dtype)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 70, 520):
            assert torch.equal(packed.product(x[:rows], bias), product_by(numbers, x[:rows], bias))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows_by_a_weight_in_blocks_have_the_bits_of_its_numbers(dtype: torch.dtype) -> None:
    """Of which a cache holds few, so that the sums of many are kept, and added to."""
    raw, numbers = blocks_of("Q4_0", 70, 9216)
    packed = PackedWeight.of_blocks([("Q4_0", raw)], dtype)
    assert packed is not None
    x, bias = random(300, 9216, seed=1).to(dtype), random(70, seed=2).to(dtype)
    for rows in (5, 40, 70, 300):
        assert torch.equal(packed.product(x[:rows], bias), product_by(numbers, x[:rows], bias))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kinds", "bits"), [("Q4_1 Q4_0 Q4_1", 5), ("Q4_K Q4_K Q4_1", 6), ("Q4_K Q5_K Q6_K", 12), ("Q4_0 Q8_0 Q8_0", 12)]
)
def test_weights_of_several_types_are_one(kinds: str, bits: int, dtype: torch.dtype) -> None:
    """Their rows lie below one another, and a unit has rows of two."""
    parts = [(kind, *blocks_of(kind, rows, 512)) for kind, rows in zip(kinds.split(), (40, 9, 15), strict=True)]
    packed = PackedWeight.of_blocks([(kind, raw) for kind, raw, _ in parts], dtype)
    assert packed is not None
    assert packed.data.nbytes * 8 == 64 * 512 * bits
    numbers = torch.cat([numbers for *_, numbers in parts])
    assert torch.equal(packed.rows(torch.arange(64)), numbers.to(dtype))
    x = random(5, 512).to(dtype)
    assert torch.equal(packed.product(x), product_by(numbers, x))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BITS)
def test_blocks_whose_numbers_are_not_kept_are_read_as_numbers(kind: str, dtype: torch.dtype) -> None:
    raw, _ = blocks_of(kind, 40, 512)
    for at in HALVES[kind]:
        for row in (0, 39):
            for bad in (float("nan"), float("inf")):
                damaged = raw.clone()
                damaged[row, at : at + 2] = torch.from_numpy(np.array([bad], "<f2").view("u1"))
                assert PackedWeight.of_blocks([(kind, damaged)], dtype) is None
    assert PackedWeight.of_blocks([("Q2_K", raw)], dtype) is None
    assert PackedWeight.of_blocks([(kind, raw)], torch.float16) is None


@needs_library
def test_a_step_whose_least_has_no_float16_is_read_as_a_number() -> None:
    raw, _ = blocks_of("Q4_0", 2, 32)
    raw[1, :2] = torch.from_numpy(np.array([9000], "<f2").view("u1"))  # eight of them are more than float16 has
    assert PackedWeight.of_blocks([("Q4_0", raw)], torch.float32) is None


@needs_library
@pytest.mark.parametrize("size", [1, 31, 160, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_gates_are_those_of_torch(size: int, dtype: torch.dtype) -> None:
    x, residual = random(5, size).to(dtype), random(5, size, seed=1).to(dtype)
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    for weight in (random(size, seed=2).to(dtype), random(size, seed=2)):
        torch.testing.assert_close(cpu_ops.rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **exact)
        normed, total = cpu_ops.add_rms_norm(x, residual, weight, 1e-5)
        expected, exact_total = add_rms_norm_reference(x, residual, weight, 1e-5)
        assert torch.equal(total, exact_total)
        torch.testing.assert_close(normed, expected, **exact)
    both = torch.cat([x * 4, residual], dim=1)
    torch.testing.assert_close(cpu_ops.silu_mul(both), silu_mul_reference(both), **exact)
    torch.testing.assert_close(cpu_ops.gelu_mul(both), gelu_mul_reference(both), **exact)


@needs_library
def test_a_gate_of_large_numbers_is_finite() -> None:
    gate = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(cpu_ops.silu_mul(gate), torch.tensor([[0.0, 0.0, 90.0, 200.0]]))


@needs_library
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_the_write_of_kv_are_those_of_torch(
    dtype: torch.dtype, kv_dtype: torch.dtype, normed: bool
) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 40, 9
    # A slice of a wider projection, as a layer with a gate has it.
    qkv = random(tokens, (heads + 2 * kv_heads) * dim + 8).to(dtype)[:, 8:]
    norm = random(heads + kv_heads, dim, seed=1).to(dtype) if normed else None
    cos, sin = random(tokens, 1, dim, seed=2).to(dtype), random(tokens, 1, dim, seed=3).to(dtype)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[4] = -1
    results = []
    for call in (cpu_ops.qk_norm_rope_write, qk_norm_rope_write_reference):
        cache = torch.zeros(32, 2, kv_heads, dim).to(kv_dtype)
        scales = torch.zeros(32, 2, kv_heads) if kv_dtype == torch.uint8 else None
        query = call(qkv, norm, 1e-6, cos, sin, slots, cache, True, scales)
        results.append([query, cache.float(), torch.zeros(1) if scales is None else scales])
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(
            mine, torchs, atol=1 if kv_dtype == torch.uint8 and mine is results[0][1] else 1e-2, rtol=1e-2
        )


@needs_library
def test_a_number_of_kv_that_is_none_is_none_in_fp8_too() -> None:
    """A request whose numbers are broken does not look as if they were not."""
    qkv, slots = random(3, 4 * 32), torch.arange(3)
    qkv[1, 2 * 32 + 5] = torch.nan  # of the key
    tables = random(2, 3, 1, 32, seed=2)
    scales = []
    for call in (cpu_ops.qk_norm_rope_write, qk_norm_rope_write_reference):
        cache, scale = torch.zeros(3, 2, 1, 32, dtype=torch.uint8), torch.zeros(3, 2, 1)
        call(qkv, None, 1e-6, tables[0], tables[1], slots, cache, True, scale)
        scales.append(scale)
    assert (
        scales[0].isnan().tolist()
        == scales[1].isnan().tolist()
        == [[[False], [False]], [[True], [False]], [[False], [False]]]
    )


@needs_library
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_context_kv_of_a_drafter_is_that_of_torch(dtype: torch.dtype, kv_dtype: torch.dtype, normed: bool) -> None:
    layers, kv_heads, dim, tokens = 3, 2, 40, 9
    projected = random(tokens, layers * 2 * kv_heads * dim).to(dtype)
    norm = random(layers, kv_heads, dim, seed=1) if normed else None
    cos, sin = random(tokens, 1, dim, seed=2).to(dtype), random(tokens, 1, dim, seed=3).to(dtype)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:tokens]
    slots[4] = -1
    results = []
    for call in (cpu_ops.context_write, context_write_reference):
        # Layers of one memory: each is written where it is.
        memory = torch.zeros(layers, 32, 2, kv_heads, dim).to(kv_dtype)
        call(projected, norm, 1e-6, cos, sin, slots, list(memory), True)
        results.append(memory.float())
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)
    assert results[0].any(dim=(2, 3, 4)).sum(dim=1).tolist() == [tokens - 1] * layers


def in_pieces(packed: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product, few rows at a time: many go in blocks, each by a thread."""
    return torch.cat([packed.product(rows, bias) for rows in x.split(100)])


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many, as torch says."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize(("tokens", "threads"), [(7, 2), (257, 2), (600, 2), (600, 12)], indirect=["threads"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_one_call_with_what_follows_has_the_bits_of_two_calls(
    dtype: torch.dtype, with_bias: bool, tokens: int, threads: int
) -> None:
    heads, kv_heads, dim, hidden = 4, 2, 32, 96
    shapes = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "out": (hidden, heads * dim), "up": (160, hidden)}
    weights = {name: PackedWeight(random(*shape, seed=i).to(dtype)) for i, (name, shape) in enumerate(shapes.items())}
    biases = {name: random(shape[0], seed=9).to(dtype) if with_bias else None for name, shape in shapes.items()}
    x, wide = random(tokens, hidden, seed=5).to(dtype), random(tokens, heads * dim, seed=6).to(dtype)
    tables = random(2, tokens, 1, dim, seed=7).to(dtype)
    norm, weight = random(heads + kv_heads, dim, seed=8).to(dtype), random(hidden, seed=4).to(dtype)
    slots, caches = (
        torch.randperm(tokens + 3, generator=torch.Generator().manual_seed(0))[:tokens],
        [torch.zeros(tokens + 3, 2, kv_heads, dim, dtype=dtype) for _ in range(2)],
    )
    slots[2] = -1
    rest = norm, 1e-6, tables[0], tables[1], slots
    both = cpu_ops.linear_rope_write(weights["qkv"], biases["qkv"], x, *rest, caches[0], True, None)
    alone = cpu_ops.qk_norm_rope_write(in_pieces(weights["qkv"], x, biases["qkv"]), *rest, caches[1], True, None)
    assert torch.equal(both, alone)
    assert torch.equal(caches[0], caches[1])
    normed = cpu_ops.linear_norm(weights["out"], biases["out"], wide, x, weight, 1e-6)
    expected = cpu_ops.add_rms_norm(in_pieces(weights["out"], wide, biases["out"]), x, weight, 1e-6)
    assert all(map(torch.equal, normed, expected))
    assert torch.equal(weights["up"].product(x, biases["up"]), in_pieces(weights["up"], x, biases["up"]))


@needs_library
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "threads"),
    [
        (7, 96, 80, 2),
        (7, 70, 64, 2),
        (20, 800, 96, 2),
        (40, 800, 96, 2),
        (257, 96, 96, 2),
        (257, 96, 96, 12),
        (100, 9216, 64, 2),
    ],
    indirect=["threads"],
)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", [*DTYPES, "halves", "Q4_0"])
def test_a_gated_mlp_in_one_call_has_the_bits_of_its_parts(
    kind: torch.dtype | str, with_bias: bool, tokens: int, hidden: int, inner: int, threads: int
) -> None:
    """Of 64 and 96 inner numbers, tiles compute the gate and what it lets through together."""
    dtype = kind if isinstance(kind, torch.dtype) else torch.float32 if kind == "halves" else torch.bfloat16
    if kind == "halves":  # float32 whose numbers are bfloat16
        gate_up = PackedWeight(random(2 * inner, hidden).bfloat16().float())
    elif isinstance(kind, str):
        hidden = -(-hidden // 32) * 32
        packed = PackedWeight.of_blocks([(kind, blocks_of(kind, 2 * inner, hidden)[0])], dtype)
        assert packed is not None
        gate_up = packed
    else:
        gate_up = PackedWeight(random(2 * inner, hidden).to(dtype))
    down = PackedWeight(random(hidden, inner, seed=1).bfloat16().to(dtype))
    x = random(tokens, hidden, seed=5).to(dtype)
    biases = [random(size, seed=9).to(dtype) if with_bias else None for size in (2 * inner, hidden)]
    for is_gelu, gate in ((False, cpu_ops.silu_mul), (True, cpu_ops.gelu_mul)):
        mlp = cpu_ops.gated_mlp(gate_up, biases[0], down, biases[1], x, is_gelu)
        assert torch.equal(mlp, in_pieces(down, gate(in_pieces(gate_up, x, biases[0])), biases[1]))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 17, 8193])
def test_the_chosen_token_is_that_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    logits = random(5, vocab).to(dtype) * 3
    logits[1, vocab // 2] = logits[1, 0] = 100.0  # the lowest among equals
    assert torch.equal(cpu_ops.argmax(logits), argmax_reference(logits.float()))
    temperature = torch.tensor([0.7, 0.0, 1.0, 2.0, 0.1])
    seeds, positions = torch.tensor([-5, 1, 2**62, 7, 0]), torch.arange(5)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0)) + 9
    for lowest in (None, logits.float().mean(1)):
        for named in (None, ids):
            call = logits, temperature, seeds, positions, lowest, named
            assert torch.equal(cpu_ops.sample(*call), sample_reference(*call))


@needs_library
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_an_odd_logit_is_chosen_as_by_torch(odd: float) -> None:
    logits = random(2, 9000)
    logits[0, 8500] = odd
    logits[1] = odd
    assert cpu_ops.argmax(logits).tolist() == argmax_reference(logits).tolist()


def test_without_a_compiler_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path])
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)
    for wanted in ("build", "1"):
        monkeypatch.setenv(cpu_library.SWITCH, wanted)
        assert cpu_library.load.__wrapped__() is None
    monkeypatch.setattr(cpu_library, "load", lambda: None)
    assert cpu_library.build_for_next_start.__wrapped__() is None
    assert list(tmp_path.iterdir()) == []
    assert f"such as g++, and run: {sys.executable} -m dflash_kernels.cpu_library" in caplog.text


def test_a_start_without_the_library_builds_it_for_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cpu_library.SWITCH, "1")
    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path])
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(cpu_library, "_compiled", lambda compiler, made: bool(made.write_bytes(b"library")))
    monkeypatch.setattr(cpu_library, "load", cpu_library.load.__wrapped__)
    assert cpu_library.load() is None
    thread = cpu_library.build_for_next_start.__wrapped__()
    assert thread is not None
    thread.join()
    assert cpu_library.find() == tmp_path / cpu_library.library_name()


def test_a_library_that_this_processor_does_not_run_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As under a hypervisor that has less than the processor says: the trial dies of an illegal instruction."""

    def run(command: list[str], **options: object) -> None:
        if "-c" in command:
            raise subprocess.CalledProcessError(-4, command)
        Path(command[-1]).write_bytes(b"library")

    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path])
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(cpu_library.subprocess, "run", run)
    assert cpu_library.build() is None
    assert list(tmp_path.iterdir()) == []
    assert "cannot be built, so torch computes" in caplog.text
    assert "SIGILL" in caplog.text


def test_a_library_is_found_again_and_one_of_another_source_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path / "none", tmp_path])
    (tmp_path / cpu_library.library_name()).write_bytes(b"")
    assert cpu_library.find() == tmp_path / cpu_library.library_name()
    source, headers = cpu_library.SOURCE, sorted(cpu_library.SOURCE.parent.glob("cpu_*.h"))
    assert headers
    for changed in (source, headers[-1]):
        for path in (source, *headers):
            (tmp_path / path.name).write_text(path.read_text() + "\n" * (path == changed))
        monkeypatch.setattr(cpu_library, "SOURCE", tmp_path / source.name)
        assert cpu_library.find() is None


def test_the_environment_leaves_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_library.SWITCH, "0")
    assert cpu_library.load.__wrapped__() is None


@pytest.mark.nightly
@pytest.mark.parametrize("features", cpu_library.LEVELS)
def test_a_library_for_fewer_features_passes_the_same_tests(features: str) -> None:
    """As on a processor without AMX, or without AVX-512."""
    files = [Path(__file__), Path(__file__).parents[1] / "attention" / "test_cpu_backend.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not nightly", *map(str, files)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {cpu_library.SWITCH: features}, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_a_level_leaves_out_what_is_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for level in (*cpu_library.LEVELS, "1"):
        monkeypatch.setenv(cpu_library.SWITCH, level)
        names.add(cpu_library.library_name())
        switches = " ".join(cpu_library.processor_switches())
        assert ("avx512" not in switches) or level != "avx2"
        assert ("amx" not in switches) or level not in cpu_library.LEVELS
    if "amx" in switches:
        assert len(names) == 3


@pytest.mark.parametrize("content", [b"", b"\x7fELF cut short"])
def test_a_damaged_library_leaves_all_to_torch_and_is_named(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(cpu_library.SWITCH, "1")
    path = tmp_path / cpu_library.library_name()
    path.write_bytes(content)
    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path])
    assert cpu_library.load.__wrapped__() is None
    assert f"{path} cannot be loaded" in caplog.text
    assert "remove it to have it built again" in caplog.text


@needs_library
@pytest.mark.parametrize(("block_size", "window", "has_sinks"), [(16, None, False), (8, 17, True), (16, 100, True)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 80), (2, 2, 32)])
def test_a_query_has_the_same_bits_alone_and_among_many(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    window: int | None,
    has_sinks: bool,
) -> None:
    """Few queries of a row are computed in another way than many."""
    num_heads, num_kv_heads, dim = heads
    num_blocks, num_queries, context = 40, 20, 163
    cache, scales = 3 * random(num_blocks, block_size, 2, num_kv_heads, dim), None
    if kv_dtype == torch.uint8:
        cache, scales = cache.abs().mul(20).clamp(max=120), random(*cache.shape[:4]).abs() / 50
    query, cache = 2 * random(num_queries, num_heads, dim, seed=1).to(dtype), cache.to(kv_dtype)
    sinks = random(num_heads, seed=2).to(dtype) if has_sinks else None
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int().numpy()[None]

    def attended(first: int, last: int) -> torch.Tensor:
        out, zero = torch.empty(last - first, num_heads * dim, dtype=dtype), np.zeros(1, np.int64)
        lens = np.array([last - first]), np.array([context - num_queries + last])
        cpu_ops.attend(query[first:last], cache, scales, out, table, zero, *lens, True, window, sinks)
        return out

    whole = attended(0, num_queries)
    for first, last in ((0, 1), (3, 5), (11, 14), (19, 20)):
        assert torch.equal(attended(first, last), whole[first:last])


@pytest.mark.skipif(cpu_library.find_compiler() is None, reason="needs a C++ compiler")
def test_the_source_is_right_for_processors_with_amx_wherever_it_is_built() -> None:
    compiler = cpu_library.find_compiler()
    assert compiler is not None
    command = [compiler, *cpu_library.FLAGS, *cpu_library.FEATURES.values(), "-fsyntax-only", str(cpu_library.SOURCE)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "unrecognized command" in said.stderr or "unknown argument" in said.stderr:
        pytest.skip("the compiler knows no AMX")
    assert said.returncode == 0, said.stderr
