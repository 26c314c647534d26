"""Attention of rows that share the beginning of their KV, in two launches and a merge, equals attention of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.fp8_kv import dequantise_kv_reference, quantise_kv_reference
from dflash_kernels.paged_attention import paged_attention, paged_attention_reference, prepare_launches
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, plan_launches
from dflash_kernels.shared_prefix import SharedRows, merge_parts, merge_parts_reference, split_rows
from tests.kernels.inputs import DEVICE
from tests.kernels.test_paged_attention import TOLERANCE

HEAD_DIM = 16


@dataclass
class SharedCase:
    """Rows in groups, each (its rows' query_lens, positions that are shared, positions of each row's own).

    padding: places for groups, and rows, that are not there. bounds_only: launches are planned as for a captured step.
    fp8: KV is, with a scale for each token and head.
    """

    groups: list[tuple[list[int], int, list[int]]]
    heads: tuple[int, int] = (4, 2)
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    sink: float | None = None
    padding: int = 0
    bounds_only: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(shared for _, shared, _ in self.groups))
        query_lens = [n for lens, _, _ in self.groups for n in lens] + [0] * self.padding
        seq_lens = [shared + n for _, shared, own in self.groups for n in own] + [0] * self.padding
        self.num_rows, width = len(query_lens), -(-max(seq_lens) // self.block_size)
        num_blocks = self.num_rows * width + 1
        tables = torch.randperm(num_blocks, generator=generator)[: self.num_rows * width].view(self.num_rows, width)
        leader, num_rows, positions, of_row = [], [], [], []
        for lens, shared, _ in self.groups:
            first, blocks = len(of_row), shared // self.block_size
            tables[first : first + len(lens), :blocks] = tables[first, :blocks].clone()
            if shared:
                leader.append(first)
                num_rows.append(len(lens))
                positions.append(shared)
            of_row += [shared] * len(lens)
        columns = [leader, num_rows, positions, of_row]
        columns = [column + [0] * self.padding for column in columns]
        self.shared = SharedRows(*(torch.tensor(column, dtype=torch.int32) for column in columns))
        starts = np.cumsum(query_lens) - query_lens
        self.rows = PagedBatch(
            *(torch.tensor(column, dtype=torch.int32) for column in (starts.tolist(), query_lens, seq_lens)),
            tables.int(),
        )
        num_tokens = sum(query_lens) + self.padding
        self.query = torch.randn(num_tokens, self.heads[0], HEAD_DIM, generator=generator).to(self.dtype)
        cache_shape = (num_blocks, self.block_size, 2, self.heads[1], HEAD_DIM)
        self.cache = torch.randn(cache_shape, generator=generator).to(self.dtype)
        self.scales = None
        if self.fp8:
            # Heads of very different sizes: the scale of a neighbour, or of K for V, shows.
            sizes = 10 ** torch.empty(cache_shape[:-1]).uniform_(-1, 1, generator=generator)
            self.cache, self.scales = quantise_kv_reference(self.cache * sizes[..., None])
        self.sinks = None
        if self.sink is not None:
            self.sinks = (self.sink + torch.randn(self.heads[0], generator=generator)).to(self.dtype)

    def part(self, rows: PagedBatch, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention of one part and its denominators' logarithms; what is no row's is NaN and -inf."""
        lens, ends = rows.query_lens.cpu().numpy().astype(int), rows.seq_lens.cpu().numpy().astype(int)
        overestimate = 0
        if self.bounds_only:
            overestimate = int(ends.max())
            lens, ends = np.full(len(lens), max(lens.max(), 1)), np.full(len(lens), overestimate)
        shape = HeadShape(*self.heads, HEAD_DIM, self.dtype.itemsize)
        launches = plan_launches(lens, ends, shape, causal, None, HOPPER, overestimate)
        tiled = [(each, None if each.tiles is None else torch.from_numpy(each.tiles).to(DEVICE)) for each in launches]
        prepared = prepare_launches(tiled, rows, shape.group, self.block_size, causal, None)
        num_tokens = len(self.query)
        out = torch.full((num_tokens, self.heads[0] * HEAD_DIM), float("nan"), device=DEVICE)
        lse = torch.full((num_tokens, self.heads[0]), float("-inf"), device=DEVICE)
        query, cache = self.query.to(DEVICE), self.cache.to(DEVICE)
        scales = None if self.scales is None else self.scales.to(DEVICE)
        paged_attention(query, cache, rows, prepared, causal, None, out, scales=scales, out_lse=lse)
        return out, lse

    def run(self) -> torch.Tensor:
        """Both parts, merged."""
        rows = PagedBatch(*(getattr(self.rows, name).to(DEVICE) for name in PagedBatch.__dataclass_fields__))
        shared = SharedRows(*(getattr(self.shared, name).to(DEVICE) for name in SharedRows.__dataclass_fields__))
        own, prefix = split_rows(rows, shared, self.block_size)
        out = torch.empty(len(self.query), self.heads[0] * HEAD_DIM, dtype=self.dtype, device=DEVICE)
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        merge_parts(*self.part(own, causal=True), *self.part(prefix, causal=False), out, sinks)
        return out.cpu()

    def check(self) -> None:
        rows, cache = self.rows, self.cache
        if self.scales is not None:
            cache = dequantise_kv_reference(cache, self.scales, self.dtype)
        expected = paged_attention_reference(self.query.double(), cache.double(), rows, True, None, self.sinks)
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(self.run().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_parts_of_other_dtypes_are_merged_in_place_and_leave_their_logarithm(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """As a third part would find it: results of 5 tokens and 4 heads, some of which saw nothing."""
    generator = torch.Generator().manual_seed(1)
    own, prefix = (torch.randn(5, 4 * HEAD_DIM, generator=generator).to(dtype) for dtype in dtypes)
    own_lse, prefix_lse = (3 * torch.randn(5, 4, generator=generator) for _ in "ab")
    own_lse[1], prefix_lse[3], own_lse[4], prefix_lse[4] = (float("-inf"),) * 4
    expected, lse = torch.empty(5, 4 * HEAD_DIM), torch.empty(5, 4)
    merge_parts_reference(own, own_lse, prefix, prefix_lse, expected, out_lse=lse)
    weights = torch.stack([own_lse, prefix_lse]).exp2()
    torch.testing.assert_close(lse, weights.sum(0).log2())
    parts = torch.stack([own.float(), prefix.float()]).view(2, 5, 4, HEAD_DIM)[:, :4]
    shares = (weights / weights.sum(0))[:, :4, :, None]
    torch.testing.assert_close(expected[:4], (parts * shares).sum(0).flatten(1))
    assert not expected[4].any()
    device = [tensor.to(DEVICE) for tensor in (own, own_lse, prefix, prefix_lse)]
    # Over the part that is in float32.
    out = device[dtypes.index(torch.float32) * 2]
    merge_parts(*device, out, out_lse=device[1])
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(device[1].cpu(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bounds_only", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_groups_beside_rows_that_share_nothing(bounds_only: bool, padding: int) -> None:
    groups = [([3, 3], 32, [3, 17]), ([3], 0, [9]), ([3, 2, 3], 8, [5, 4, 40]), ([1, 3], 0, [1, 20])]
    SharedCase(groups, bounds_only=bounds_only, padding=padding).check()


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 2), (5, 1)])
def test_any_grouping_of_heads(heads: tuple[int, int]) -> None:
    SharedCase([([4, 4, 4], 64, [4, 9, 30])], heads=heads).check()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_groups_of_few_and_of_many_rows(count: int) -> None:
    """Nine rows of eight queries and four heads take several tiles."""
    SharedCase([([8] * count, 40, [8 + i for i in range(count)])]).check()


@pytest.mark.parametrize("sink", [-1.0, 4.0])
def test_a_sink_enters_once(sink: float) -> None:
    SharedCase([([2, 2], 16, [2, 7]), ([2], 0, [5])], sink=sink).check()


@pytest.mark.parametrize("sink", [None, 2.0])
@pytest.mark.parametrize("bounds_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kv_in_fp8(dtype: torch.dtype, bounds_only: bool, sink: float | None) -> None:
    groups = [([3, 3], 32, [3, 17]), ([3], 0, [9]), ([3, 2, 3], 8, [5, 4, 40])]
    SharedCase(groups, dtype=dtype, fp8=True, bounds_only=bounds_only, sink=sink, padding=2).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types(dtype: torch.dtype) -> None:
    SharedCase([([2, 2, 1], 48, [2, 7, 11])], dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_blocks_of_any_size(block_size: int) -> None:
    SharedCase([([2, 2], 5 * block_size, [3, 9])], block_size=block_size).check()


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_merge_equals_its_reference_with_parts_that_saw_nothing(with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    num_tokens, num_heads = 37, 3
    parts = []
    for _ in range(2):
        out = torch.randn(num_tokens, num_heads * 20, generator=generator)
        lse = 30 * torch.randn(num_tokens, num_heads, generator=generator)
        unseen = torch.rand(num_tokens, num_heads, generator=generator) < 0.3
        lse[unseen] = float("-inf")
        out.view(num_tokens, num_heads, -1)[unseen] = float("nan")
        parts += [out.to(DEVICE), lse.to(DEVICE)]
    sinks = torch.randn(num_heads, generator=generator).to(DEVICE) if with_sinks else None
    expected, actual = (torch.empty_like(parts[0]) for _ in range(2))
    merge_parts_reference(*parts, expected, sinks)
    merge_parts(*parts, actual, sinks)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
