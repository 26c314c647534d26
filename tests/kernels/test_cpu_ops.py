"""The C++ operations of a CPU equal their references, and a row's result is its own whatever else is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_kernels import cpu_library, cpu_ops
from dflash_kernels.activation import gelu_mul_reference, silu_mul_reference
from dflash_kernels.argmax import argmax_reference
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
def test_a_row_of_a_product_has_the_same_bits_beside_any_others_and_by_any_threads(dtype: torch.dtype) -> None:
    x, packed = random(70, 576).to(dtype), PackedWeight(random(200, 576, seed=1).to(dtype))
    before = torch.get_num_threads()
    together = packed.product(x)
    try:
        torch.set_num_threads(2)
        assert torch.equal(packed.product(x), together)
    finally:
        torch.set_num_threads(before)
    for rows in (1, 3, 6, 16, 17, 33):
        assert torch.equal(packed.product(x[:rows]), together[:rows])
    wide = torch.cat([x, x], dim=1)  # rows that lie apart
    assert torch.equal(packed.product(wide[:, 576:]), together)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight_are_its_numbers(dtype: torch.dtype) -> None:
    weight = random(50, 33).to(dtype)
    index = torch.tensor([49, 0, 16, 16])
    assert torch.equal(PackedWeight(weight).rows(index), weight[index])
    for row in (50, -1):
        with pytest.raises(IndexError, match=f"row {row} of a weight of 50 rows"):
            PackedWeight(weight).rows(torch.tensor([0, row]))


def on_grids(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Numbers as a file in this type of GGUF has them."""
    quants = pytest.importorskip("gguf.quants")
    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    numbers = random(outputs, inputs).numpy() * 0.1
    numbers[0, :32], numbers[1, :32] = 0.0, 0.25  # blocks of one number
    return torch.from_numpy(quants.dequantize(quants.quantize(numbers, kinds[kind]), kinds[kind]))


@needs_library
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 5), ("Q4_1", 5), ("Q8_0", 8.5)])
def test_a_weight_on_grids_has_the_bits_of_its_numbers_in_fewer_bytes(kind: str, bits: float) -> None:
    for outputs, inputs in ((64, 576), (49, 1536), (7, 32)):
        numbers = on_grids(kind, outputs, inputs)
        packed, plain = PackedWeight.on_grids(numbers), PackedWeight(numbers.bfloat16())
        assert packed is not None
        assert packed.shape == (outputs, inputs)
        assert packed.data.nbytes * 8 == -(-outputs // 32) * 32 * inputs * bits
        index = torch.arange(outputs).flip(0)
        assert torch.equal(packed.rows(index), numbers.bfloat16()[index])
        x, bias = random(70, inputs, seed=1).bfloat16(), random(outputs, seed=2).bfloat16()
        for rows in (1, 16, 33, 70):
            assert torch.equal(packed.product(x[:rows], bias), plain.product(x[:rows], bias))


@needs_library
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 5), ("Q4_1", 5), ("Q8_0", 8.5)])
def test_any_codes_of_a_grid_are_found(kind: str, bits: float) -> None:
    """Of few values, that do not begin at 0, with steps of any size and, of 4 bits, of either sign."""
    quants = pytest.importorskip("gguf.quants")
    kinds = pytest.importorskip("gguf").GGMLQuantizationType
    rng, rows, blocks, most = np.random.default_rng(7), 64, 3, 256 if kind == "Q8_0" else 16
    lowest, count = rng.integers(0, most - 1, (2, rows, blocks, 1))
    codes = lowest + rng.integers(0, most, (rows, blocks, 32)) % np.minimum(count + 2, most - lowest)
    codes[..., :2] = lowest + np.array([0, 1])  # more than one value
    steps = (rng.uniform(0.5, 1, (rows, blocks, 1)) * 2.0 ** rng.integers(-12, 2, (rows, blocks, 1))).astype("f2")
    if kind == "Q8_0":
        codes[1, :, 0] = 128  # the least, with its sign
        parts = [steps.view("u1"), codes.astype("u1")]
    else:
        steps *= rng.choice([-1, 1], steps.shape).astype("f2")
        least = (steps * rng.uniform(-12, 4, steps.shape)).astype("f2")
        nibbles = (codes[..., :16] | codes[..., 16:] << 4).astype("u1")
        parts = [*(each.view("u1") for each in (steps, least)[: 1 if kind == "Q4_0" else 2]), nibbles]
    numbers = quants.dequantize(np.concatenate(parts, axis=-1).reshape(rows, -1), kinds[kind])
    packed = PackedWeight.on_grids(torch.from_numpy(numbers))
    assert packed is not None
    assert packed.data.nbytes * 8 == rows * blocks * 32 * bits
    assert torch.equal(packed.rows(torch.arange(rows)), torch.from_numpy(numbers).bfloat16())
    x = random(5, blocks * 32).bfloat16()
    assert torch.equal(packed.product(x), PackedWeight(torch.from_numpy(numbers).bfloat16()).product(x))


@needs_library
def test_a_weight_off_its_grids_is_kept_as_numbers() -> None:
    numbers = on_grids("Q4_1", 40, 64)
    for place in ((0, 0), (39, 63)):
        changed = numbers.clone()
        changed[place] += 1e-3
        assert PackedWeight.on_grids(changed) is None
    assert PackedWeight.on_grids(random(40, 64)) is None
    assert PackedWeight.on_grids(numbers[:, :48].contiguous()) is None
    assert PackedWeight.on_grids(torch.full((4, 32), float("nan"))) is None


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
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_one_call_with_what_follows_has_the_bits_of_two_calls(dtype: torch.dtype, with_bias: bool) -> None:
    heads, kv_heads, dim, tokens, hidden = 4, 2, 32, 7, 96
    width, inner = (heads + 2 * kv_heads) * dim, 80
    shapes = {"qkv": (width, hidden), "out": (hidden, heads * dim), "up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = {name: PackedWeight(random(*shape, seed=i).to(dtype)) for i, (name, shape) in enumerate(shapes.items())}
    biases = {name: random(shape[0], seed=9).to(dtype) if with_bias else None for name, shape in shapes.items()}
    x, wide = random(tokens, hidden, seed=5).to(dtype), random(tokens, heads * dim, seed=6).to(dtype)
    tables = random(2, tokens, 1, dim, seed=7).to(dtype)
    norm, weight = random(heads + kv_heads, dim, seed=8).to(dtype), random(hidden, seed=4).to(dtype)
    slots, caches = (
        torch.tensor([3, 1, -1, 0, 9, 8, 7]),
        [torch.zeros(10, 2, kv_heads, dim, dtype=dtype) for _ in range(2)],
    )
    rest = norm, 1e-6, tables[0], tables[1], slots
    both = cpu_ops.linear_rope_write(weights["qkv"], biases["qkv"], x, *rest, caches[0], True, None)
    alone = cpu_ops.qk_norm_rope_write(weights["qkv"].product(x, biases["qkv"]), *rest, caches[1], True, None)
    assert torch.equal(both, alone)
    assert torch.equal(caches[0], caches[1])
    normed = cpu_ops.linear_norm(weights["out"], biases["out"], wide, x, weight, 1e-6)
    expected = cpu_ops.add_rms_norm(weights["out"].product(wide, biases["out"]), x, weight, 1e-6)
    assert all(map(torch.equal, normed, expected))
    for is_gelu, gate in ((False, cpu_ops.silu_mul), (True, cpu_ops.gelu_mul)):
        mlp = cpu_ops.gated_mlp(weights["up"], biases["up"], weights["down"], biases["down"], x, is_gelu)
        assert torch.equal(mlp, weights["down"].product(gate(weights["up"].product(x, biases["up"])), biases["down"]))


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


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_library, "folders", lambda: [tmp_path])
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)
    for wanted in ("build", "1"):
        monkeypatch.setenv(cpu_library.SWITCH, wanted)
        assert cpu_library.load.__wrapped__() is None
    monkeypatch.setattr(cpu_library, "load", lambda: None)
    assert cpu_library.build_for_next_start.__wrapped__() is None
    assert list(tmp_path.iterdir()) == []


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
