"""Attention of a CPU over KV blocks in place equals that of torch over gathered ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch, AttentionPattern, KVLayer
from dflash_backend.attention.cpu_backend import CpuBackend
from dflash_backend.attention.selection import BACKENDS
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_kernels.cpu_ops import HAS_CPU_OPS, HAS_PAIRS
from dflash_kernels.fp8_kv import quantise_kv_reference

pytestmark = pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
BLOCK = 16
# A decode row, a verify block at the start and further on, a row that sees nothing but itself, prompts.
QUERY_LENS, SEQ_LENS = np.array([1, 3, 16, 1, 70]), np.array([130, 50, 16, 1, 90])
LONG = np.array([530]), np.array([563])
PATTERNS = [AttentionPattern(*each) for each in product([True, False], [None, 20], [False, True])]


def paged(kv_dtype: torch.dtype, kv_heads: int, dim: int) -> KVLayer:
    data = torch.randn(48, BLOCK, 2, kv_heads, dim, generator=torch.Generator().manual_seed(0))
    return KVLayer(*quantise_kv_reference(data)) if kv_dtype == torch.uint8 else KVLayer(data.to(kv_dtype))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "kv_dtype"),
    [
        (4, 2, 32, torch.float32, torch.float32),
        (9, 3, 80, torch.float32, torch.uint8),
        (9, 3, 80, torch.bfloat16, torch.bfloat16),
        (9, 3, 64, torch.bfloat16, torch.bfloat16),
        (10, 2, 64, torch.bfloat16, torch.bfloat16),
        (4, 2, 32, torch.bfloat16, torch.float32),
        (6, 2, 64, torch.bfloat16, torch.uint8),
    ],
)
def test_rows_equal_those_of_torch_and_each_is_its_own(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, pattern: AttentionPattern
) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = paged(kv_dtype, kv_heads, dim)
    tables = torch.randperm(48, generator=generator)[:45].view(5, 9).int()
    query = torch.randn(int(QUERY_LENS.sum()), heads, dim, generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(dtype) if pattern.sinks else None
    layout = AttentionBatch(QUERY_LENS, SEQ_LENS, tables)
    results = []
    for backend in (CpuBackend(BLOCK), TorchBackend(BLOCK)):
        results.append(backend.attend(query, layer, backend.prepare(layout, pattern, dtype), sinks))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
    alone = CpuBackend(BLOCK)
    row = AttentionBatch(QUERY_LENS[2:3], SEQ_LENS[2:3], tables[2:3])
    own = alone.attend(query[4:20], layer, alone.prepare(row, pattern, dtype), sinks)
    assert torch.equal(own, results[0][4:20])
    if dtype == torch.float32 or HAS_PAIRS:  # a query of a prompt is as one alone
        last = AttentionBatch(QUERY_LENS[3:4], SEQ_LENS[4:5], tables[4:5])
        own = alone.attend(query[-1:], layer, alone.prepare(last, pattern, dtype), sinks)
        assert torch.equal(own, results[0][-1:])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(("dim", "kv_dtype"), [(32, torch.float32), (80, torch.uint8), (64, torch.bfloat16)])
def test_long_prompts_in_float32_equal_those_of_torch(
    dim: int, kv_dtype: torch.dtype, pattern: AttentionPattern
) -> None:
    generator = torch.Generator().manual_seed(1)
    layer, query = paged(kv_dtype, 3, dim), torch.randn(530, 9, dim, generator=generator)
    layout = AttentionBatch(*LONG, torch.randperm(48, generator=generator)[:36].view(1, 36).int())
    sinks = torch.randn(9, generator=generator) if pattern.sinks else None
    results = []
    for backend in (CpuBackend(BLOCK), TorchBackend(BLOCK)):
        results.append(backend.attend(query, layer, backend.prepare(layout, pattern, torch.float32), sinks))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [8, 16, 24, 64])
def test_a_block_may_hold_anything_after_the_last_position_of_its_row(block: int, dtype: torch.dtype) -> None:
    """Also one that tiles would read whole."""
    num_blocks = -(-150 // block)
    data = torch.randn(3 * num_blocks, block, 2, 2, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    tables = torch.randperm(3 * num_blocks, generator=torch.Generator().manual_seed(4)).view(3, num_blocks).int()
    query_lens, seq_lens = np.array([1, 1, 20]), np.array([142, 67, 150])
    unwritten = data.clone()
    for table, num_tokens in zip(tables.tolist(), seq_lens.tolist(), strict=True):
        for index, at in enumerate(table):
            data[at, max(0, num_tokens - index * block) :] = 0.0
            unwritten[at, max(0, num_tokens - index * block) :] = torch.nan
    query = torch.randn(22, 6, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    layout, pattern = AttentionBatch(query_lens, seq_lens, tables), AttentionPattern(True, None, False)
    cpu, reference = CpuBackend(block), TorchBackend(block)
    found = cpu.attend(query, KVLayer(unwritten), cpu.prepare(layout, pattern, dtype), None)
    expected = reference.attend(query, KVLayer(data), reference.prepare(layout, pattern, dtype), None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [5, 20, 100])
@pytest.mark.parametrize("block", [8, 16, 64])
def test_blocks_before_the_window_are_not_read(
    block: int, window: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """They are given back, and another request writes there what it will; the table keeps their ids."""
    num_blocks = -(-230 // block)
    data = torch.randn(2 * num_blocks, block, 2, 2, 64, generator=torch.Generator().manual_seed(3))
    layer = KVLayer(*quantise_kv_reference(data)) if kv_dtype == torch.uint8 else KVLayer(data.to(kv_dtype))
    foreign = KVLayer(layer.data.clone(), None if layer.scales is None else layer.scales.clone())
    tables = torch.arange(2 * num_blocks).view(2, num_blocks).int()
    query_lens, seq_lens = np.array([4, 30]), np.array([210, 230])
    for table, first in zip(tables, (seq_lens - query_lens).tolist(), strict=True):
        freed = table[: max(0, first - window + 1) // block].long()
        if foreign.scales is None:
            foreign.data[freed] = torch.nan
        else:
            foreign.scales[freed] = torch.nan
    query = torch.randn(34, 6, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    layout, pattern = AttentionBatch(query_lens, seq_lens, tables), AttentionPattern(True, window, False)
    cpu, reference = CpuBackend(block), TorchBackend(block)
    found = cpu.attend(query, foreign, cpu.prepare(layout, pattern, dtype), None)
    assert torch.equal(found, cpu.attend(query, layer, cpu.prepare(layout, pattern, dtype), None))
    expected = reference.attend(query, layer, reference.prepare(layout, pattern, dtype), None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_blocks_before_the_window_of_a_long_prompt_are_not_read() -> None:
    layer, query = paged(torch.float32, 2, 64), torch.randn(520, 4, 64, generator=torch.Generator().manual_seed(1))
    layer.data[0] = torch.nan
    table, pattern, results = torch.arange(1, 45).view(1, 44).int(), AttentionPattern(True, 100, False), []
    for given_back in (0, 5):  # the window begins at position 81
        tables = table.clone()
        tables[:, :given_back] = 0
        layout, cpu = AttentionBatch(np.array([520]), np.array([700]), tables), CpuBackend(BLOCK)
        results.append(cpu.attend(query, layer, cpu.prepare(layout, pattern, torch.float32), None))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_some_queries_see_whole_hides_from_the_others(causal: bool, dtype: torch.dtype) -> None:
    """Before it and, where later positions are seen, after it."""
    layer = paged(dtype, 2, 64)
    layout = AttentionBatch(np.array([230, 3]), np.array([230, 300]), torch.arange(38).view(2, 19).int())
    query = torch.randn(233, 6, 64, generator=torch.Generator().manual_seed(7)).to(dtype)
    pattern, results = AttentionPattern(causal, 70, False), []
    for backend in (CpuBackend(BLOCK), TorchBackend(BLOCK)):
        results.append(backend.attend(query, layer, backend.prepare(layout, pattern, dtype), None))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3, 4, 8])
def test_no_number_of_threads_changes_a_row(threads: int, dtype: torch.dtype) -> None:
    """Rows of one thread each, rows that are left over and shared by heads, and long ones first."""
    layer = paged(dtype, 3, 64)
    query_lens, seq_lens = np.array([1, 1, 3, 1, 1]), np.array([17, 140, 33, 1, 64])
    layout = AttentionBatch(query_lens, seq_lens, torch.arange(45).view(5, 9).int())
    query = torch.randn(7, 6, 64, generator=torch.Generator().manual_seed(6)).to(dtype)
    results, before = [], torch.get_num_threads()
    try:
        for number in (2, threads):
            torch.set_num_threads(number)
            cpu = CpuBackend(BLOCK)
            results.append(
                cpu.attend(query, layer, cpu.prepare(layout, AttentionPattern(True, None, False), dtype), None)
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("growth", [-0.2, 0.02, 0.2, 3.0])
def test_scores_that_grow_with_the_position_move_the_maximum(growth: float, dtype: torch.dtype) -> None:
    """By less than what a maximum may lag behind, by more from one 64 positions to the next, and by more than a number
    could hold."""
    layer = paged(dtype, 1, 32)
    layer.data[:, :, 0] *= 0.1
    layer.data[:, :, 0, 0, 0] = torch.arange(48 * BLOCK).view(48, BLOCK) % 256
    query = torch.randn(21 + 520, 3, 32, generator=torch.Generator().manual_seed(2)) * 0.1
    query[:, :, 0] = growth * 32**0.5
    layout = AttentionBatch(
        np.array([1, 20, 520]), np.array([250, 230, 520]), torch.arange(48).repeat(3)[:99].view(3, 33).int()
    )
    results = []
    for backend in (CpuBackend(BLOCK), TorchBackend(BLOCK)):
        context = backend.prepare(layout, AttentionPattern(True, None, False), dtype)
        results.append(backend.attend(query.to(dtype), layer, context, None))
    # Scores of some hundreds are off by more than that, in torch too, which is further from float64.
    tolerance = 1e-5 + 2e-4 * max(growth, 0) if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dim", "size"), [(64, 1.0), (64, 4.0), (128, 1.0), (48, 1e-12)])
def test_long_prompts_in_float32_are_as_exact_as_torch(dim: int, size: float) -> None:
    """No further from float64 than torch's float32 is, but for rounding."""
    generator = torch.Generator().manual_seed(3)
    layer = KVLayer(torch.randn(48, BLOCK, 2, 2, dim, generator=generator) * size)
    query = torch.randn(620, 4, dim, generator=generator) * size
    layout = AttentionBatch(
        np.array([620]), np.array([710]), torch.randperm(48, generator=generator)[:45].view(1, 45).int()
    )
    pattern = AttentionPattern(True, None, False)
    results = [
        each.attend(query, layer, each.prepare(layout, pattern, torch.float32))
        for each in (CpuBackend(BLOCK), TorchBackend(BLOCK))
    ]
    keys, values = (
        layer.data[layout.block_tables[0]].view(-1, 2, 2, dim)[:710].double().repeat_interleave(2, dim=2).unbind(dim=1)
    )
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / dim**0.5
    scores.masked_fill_(torch.arange(710) > torch.arange(90, 710)[:, None], -torch.inf)
    exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
    own, of_torch = ((each.view(exact.shape).double() - exact).abs().max() for each in results)
    assert own <= 1.5 * of_torch + 1e-7 * size


@pytest.mark.parametrize("block", [8, 16, 24])
@pytest.mark.parametrize("window", [None, 37])
def test_queries_in_float32_have_the_bits_of_each_alone(block: int, window: int | None) -> None:
    """One to some hundreds: few read values where these lie, more have copies of them."""
    data = torch.randn(400 // block + 1, block, 2, 2, 32, generator=torch.Generator().manual_seed(6))
    tables = torch.arange(len(data)).view(1, -1).int()
    query = torch.randn(300, 4, 32, generator=torch.Generator().manual_seed(7))
    backend, pattern = CpuBackend(block), AttentionPattern(True, window, False)

    def attended(first: int, last: int) -> torch.Tensor:
        layout = AttentionBatch(np.array([last - first]), np.array([100 + last]), tables)
        return backend.attend(query[first:last], KVLayer(data), backend.prepare(layout, pattern, torch.float32), None)

    whole = attended(0, 300)
    for num_queries in (1, 2, 3, 4, 7, 40):
        for first in (0, 27, 141, 260):
            assert torch.equal(attended(first, first + num_queries), whole[first : first + num_queries])


@pytest.mark.parametrize("size", [1.0, 1e4, 1.1e15])
def test_the_largest_score_weighs_one_however_large_it_is(size: float) -> None:
    data = torch.zeros(2, BLOCK, 2, 1, 16)
    data[0, 0, 0], data[0, 1, 0], data[0, :2, 1] = size / 8, -size / 8, 1.0
    layout = AttentionBatch(np.array([1]), np.array([2]), torch.tensor([[0, 1]], dtype=torch.int32))
    backend = CpuBackend(BLOCK)
    metadata = backend.prepare(layout, AttentionPattern(True, None, False), torch.float32)
    found = backend.attend(torch.full((1, 1, 16), size), KVLayer(data), metadata, None)
    assert torch.allclose(found, torch.ones(1, 16), atol=1e-6)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7FC001FF, -1])
def test_nan_in_a_key_that_is_seen_is_nan_in_the_output(bits: int) -> None:
    data = torch.ones(1, BLOCK, 2, 1, 16)
    data[0, 1, 0] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    layout = AttentionBatch(np.array([1]), np.array([3]), torch.zeros(1, 1, dtype=torch.int32))
    backend = CpuBackend(BLOCK)
    metadata = backend.prepare(layout, AttentionPattern(True, None, False), torch.float32)
    assert backend.attend(torch.ones(1, 1, 16), KVLayer(data), metadata, None).isnan().all()


def test_it_is_the_first_choice_on_a_cpu() -> None:
    names = list(BACKENDS)
    assert names.index("cpu") < names.index("torch")
