"""The paged-attention kernel equals its reference, which runs in float64 over the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.fp8_kv import dequantise_kv_reference, quantise_kv_reference
from dflash_kernels.paged_attention import paged_attention, paged_attention_reference, prepare_launches
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, Launch, plan_launches
from tests.kernels.inputs import DEVICE
from tests.support.scale import SCALE, one_in

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """Rows over scattered blocks. Bounds of None: the lengths themselves; tokens lie `gap` apart between rows, each
    with room for its bound or, `packed`, behind one another with what is left at the end. sink: the mean of the heads'
    sinks, None for none. fp8: KV is, with a scale for each token and head."""

    query_lens: list[int]
    seq_lens: list[int]
    query_bounds: list[int] | None = None
    gap: int = 0
    packed: bool = False
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sink: float | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.seq_lens) + self.head_dim)
        self.bounds = np.array(self.query_bounds or self.query_lens)
        starts = np.cumsum(self.bounds + self.gap) - self.bounds
        if self.packed:
            starts = np.cumsum(self.query_lens) - self.query_lens
        num_rows, width = len(self.bounds), -(-max(self.seq_lens) // self.block_size)
        num_blocks = num_rows * width + 2
        num_tokens = int(self.bounds.sum()) + self.gap * (len(self.bounds) + 1)
        self.query = torch.randn(num_tokens, self.heads[0], self.head_dim, generator=generator).to(self.dtype)
        shape = (num_blocks, self.block_size, 2, self.heads[1], self.head_dim)
        self.cache = torch.randn(shape, generator=generator).to(self.dtype)
        self.scales = None
        if self.fp8:
            # Heads of very different sizes: the scale of a neighbour, or of K for V, shows.
            sizes = 10 ** torch.empty(shape[:-1]).uniform_(-1, 1, generator=generator)
            self.cache, self.scales = quantise_kv_reference(self.cache * sizes[..., None])
        tables = torch.randperm(num_blocks, generator=generator)[: num_rows * width].view(num_rows, width)
        columns = (starts.tolist(), self.query_lens, self.seq_lens)
        self.rows = PagedBatch(*(torch.tensor(column, dtype=torch.int32) for column in columns), tables.int())
        self.sinks = None
        if self.sink is not None:
            self.sinks = (self.sink + torch.randn(self.heads[0], generator=generator)).to(self.dtype)

    def reference(self, causal: bool, window: int | None) -> torch.Tensor:
        cache = self.cache
        if self.scales is not None:
            cache = dequantise_kv_reference(cache, self.scales, self.dtype)
        return paged_attention_reference(self.query.double(), cache.double(), self.rows, causal, window, self.sinks)

    def run(
        self,
        causal: bool,
        window: int | None,
        splits: int | None = None,
        small: bool = True,
        workers: int | None = None,
        loop: str | None = None,
    ) -> torch.Tensor:
        """The kernel's output. `small`: few positions at a time, so that short contexts have many tiles and pieces.
        `splits`: 1 for a program for each tile, else so many workers for each tile; or `workers` for all of them.
        `loop`: in place of the tiling's."""
        shape = HeadShape(*self.heads, self.head_dim, self.dtype.itemsize)
        launches = plan_launches(self.bounds, np.array(self.seq_lens), shape, causal, window, HOPPER)
        if small:
            launches = [replace(launch, tiling=replace(launch.tiling, block_n=16, min_chunk=16)) for launch in launches]
        if loop is not None:
            launches = [replace(launch, tiling=replace(launch.tiling, loop=loop)) for launch in launches]
        if splits is not None:
            each = splits if splits > 1 else 0
            launches = [replace(launch, num_workers=each * launch.num_tiles) for launch in launches]
        if workers is not None:
            launches = [replace(launch, num_workers=workers) for launch in launches]
        tiled = [(launch, on_device(launch)) for launch in launches]
        r = self.rows
        rows = PagedBatch(*(t.to(DEVICE) for t in (r.query_start, r.query_lens, r.seq_lens, r.block_tables)))
        prepared = prepare_launches(tiled, rows, shape.group, self.block_size, causal, window)
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        query, cache = self.query.to(DEVICE), self.cache.to(DEVICE)
        scales = None if self.scales is None else self.scales.to(DEVICE)
        return paged_attention(query, cache, rows, prepared, causal, window, sinks=sinks, scales=scales).cpu()

    def check(self, causal: bool, window: int | None, splits: int | None = None, small: bool = True) -> None:
        self.compare(self.run(causal, window, splits, small), causal, window)

    def check_shares(self, workers: int, causal: bool, window: int | None) -> None:
        self.compare(self.run(causal, window, workers=workers), causal, window)

    def compare(self, actual: torch.Tensor, causal: bool, window: int | None) -> None:
        assert actual.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(actual.double(), self.reference(causal, window), atol=tolerance, rtol=tolerance)


def on_device(launch: Launch) -> torch.Tensor | None:
    return None if launch.tiles is None else torch.from_numpy(launch.tiles).to(DEVICE)


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((1, 1), 64), ((4, 2), 80), ((3, 1), 96), ((4, 1), 128), ((5, 1), 64), ((7, 1), 48), ((8, 1), 64), ((16, 1), 256)],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_any_grouping_of_heads_and_head_size(heads: tuple[int, int], head_dim: int, splits: int) -> None:
    Case([2, 1], [37, 18], heads=heads, head_dim=head_dim).check(True, None, splits)


@pytest.mark.parametrize("causal", [True, False])
# None, itself alone, less than a block, past a tile's border, more than any row.
@pytest.mark.parametrize("window", [None, 1, 5, 20, 1000])
@pytest.mark.parametrize("splits", [1, 3])
def test_any_pattern_and_number_of_splits(causal: bool, window: int | None, splits: int) -> None:
    Case([3, 2], [61, 7], heads=(2, 1)).check(causal, window, splits)


# None, a block, no block that all of a tile's queries see, some of them; and, in `make nightly`, itself alone and more
# than any row.
@pytest.mark.parametrize(
    ("loop", "splits", "causal", "window"),
    one_in(2, ["split", "overlapped"], [1, 3], [True, False], [None, 16, 20, 50, *((1, 1000) if SCALE >= 4 else ())]),
)
def test_blocks_that_all_queries_see_need_no_masks(loop: str, splits: int, causal: bool, window: int | None) -> None:
    """Tiles of 16 queries behind 0, 1, 15, 16, 66 and 100 positions; the last one is in a share by itself."""
    lens, behind = [40, 17, 3, 16, 33, 1], [0, 1, 15, 16, 66, 100]
    case = Case(lens, [n + more for n, more in zip(lens, behind, strict=True)], heads=(1, 1))
    case.compare(case.run(causal, window, splits, loop=loop), causal, window)


@pytest.mark.parametrize(
    ("loop", "shape", "fp8"),
    one_in(2, ["split", "overlapped"], [((4, 2), 80), ((5, 1), 64), ((3, 1), 24)], [False, True]),
)
def test_loops_without_masks_for_any_heads_and_kv(loop: str, shape: tuple[tuple[int, int], int], fp8: bool) -> None:
    heads, head_dim = shape
    case = Case([9, 2], [71, 50], heads=heads, head_dim=head_dim, block_size=5, fp8=fp8, sink=0.5)
    case.compare(case.run(True, None, 1, loop=loop), True, None)
    case.compare(case.run(True, 40, 2, loop=loop), True, 40)


@pytest.mark.parametrize("loop", ["split", "overlapped"])
@pytest.mark.parametrize("splits", [1, 3])
def test_loops_without_masks_read_what_is_the_rows_alone(loop: str, splits: int) -> None:
    case = Case([20, 3, 0], [57, 33, 0], query_bounds=[20, 20, 20], heads=(2, 1))
    mine = torch.zeros(case.cache.shape[:2], dtype=torch.bool)
    for row, length in enumerate(case.rows.seq_lens.tolist()):
        key = torch.arange(length)
        mine[case.rows.block_tables[row, key // 16].long(), key % 16] = True
    expected = case.reference(True, None)
    case.cache[~mine] = float("nan")
    actual = case.run(True, None, splits, loop=loop)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("splits", [1, 2])
def test_contexts_that_end_at_and_around_borders(seq_len: int, splits: int) -> None:
    Case([1, 1], [seq_len, 34 - seq_len], heads=(1, 1)).check(True, None, splits)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    Case([3, 1], [40, 70], heads=(2, 1), block_size=block_size).check(True, None, 2)
    Case([3, 1], [40, 70], heads=(2, 1), block_size=block_size).check(False, 9, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("splits", [1, 2])
def test_prefill_chunks_beside_decode_rows(causal: bool, window: int | None, splits: int) -> None:
    # 19 queries need two tiles of 16; the row of 17 is a whole prompt.
    Case([19, 1, 17, 2], [41, 50, 17, 33], heads=(1, 1)).check(causal, window, splits)


@pytest.mark.parametrize(("window", "splits"), [(None, 3), (4, 1), (4, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_nothing_of_a_piece_that_others_see(causal: bool, window: int | None, splits: int) -> None:
    Case([34], [38], heads=(1, 1), dtype=torch.float16).check(causal, window, splits)


def test_tiles_that_are_merged_among_many_without_queries() -> None:
    Case([3, 1, 0, 30], [61, 40, 0, 50], query_bounds=[30] * 4, packed=True, heads=(4, 2)).check(True, None, 3)
    Case([20, 5], [45, 37], heads=(16, 1)).check(True, 30, 3)


def test_more_splits_than_are_merged_at_a_time() -> None:
    case = Case([1, 1], [320, 310], heads=(1, 1))
    case.cache[case.rows.block_tables[:, -2:].long()] *= 4  # the last ones weigh most
    case.check(True, None, splits=20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_half_precision_within_its_rounding(dtype: torch.dtype, splits: int) -> None:
    Case([3, 1], [50, 35], dtype=dtype, head_dim=64, heads=(2, 1)).check(True, None, splits)
    Case([3, 1], [50, 35], dtype=dtype, head_dim=64, heads=(2, 1)).check(False, None, splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiling_and_splits_that_a_gpu_gets(dtype: torch.dtype) -> None:
    Case([2, 1], [300, 260], dtype=dtype, head_dim=32, heads=(2, 1)).check(True, None, small=False)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 7), (False, 7)])
def test_lengths_below_their_bounds_and_padding_give_zeros(splits: int, causal: bool, window: int | None) -> None:
    """A captured graph: every row has the same bound, some are shorter, one is padding."""
    case = Case([3, 2, 0, 3], [45, 20, 0, 3], query_bounds=[3] * 4, heads=(2, 1))
    case.check(causal, window, splits)
    assert not case.run(causal, window, splits)[6:9].any()


@pytest.mark.parametrize(
    ("splits", "bound", "pattern"), one_in(2, [1, 3], [4, 20], [(True, None), (False, None), (True, 7)])
)
def test_rows_of_any_length_within_one_bound_leave_each_other_alone(
    splits: int, bound: int, pattern: tuple[bool, int | None]
) -> None:
    """A captured graph whose rows share its tokens: behind a row's last query lies the next row's first."""
    causal, window = pattern
    case = Case([3, 1, 0, 4, 2], [45, 20, 0, 9, 33], query_bounds=[bound] * 5, packed=True, heads=(2, 1))
    case.check(causal, window, splits)
    assert not case.run(causal, window, splits)[10:].any()


@pytest.mark.parametrize("splits", [1, 3])
def test_tokens_between_rows_give_zeros(splits: int) -> None:
    Case([17, 2, 0, 1], [17, 20, 0, 45], query_bounds=[18, 3, 2, 1], gap=2, heads=(1, 1)).check(True, None, splits)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("splits", [1, 3])
def test_what_others_left_in_a_block_does_not_count(causal: bool, splits: int) -> None:
    case = Case([3], [37], heads=(2, 1))
    key = torch.arange(37)
    mine = torch.zeros(case.cache.shape[:2], dtype=torch.bool)
    mine[case.rows.block_tables[0, key // 16].long(), key % 16] = True
    case.cache[~mine] = float("nan")
    actual = case.run(causal, None, splits)
    case.cache[~mine] = 0.0
    torch.testing.assert_close(actual.double(), case.reference(causal, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, 5)])
def test_a_row_longer_than_its_table_reads_nothing_past_it(causal: bool, window: int | None) -> None:
    case = Case([2, 2], [40, 30], heads=(2, 1))
    expected = case.reference(causal, window)
    case.rows.seq_lens[1] = 1 << 30
    # Its table ends with a block that it does not have, before the first; what lies behind the table is no block.
    case.cache = torch.cat([torch.full_like(case.cache[:1], float("nan")), case.cache])[1:]
    case.rows.block_tables[1, 2] = -1
    case.rows = replace(case.rows, block_tables=F.pad(case.rows.block_tables, (0, 5), value=1 << 20)[:, :3])
    actual = case.run(causal, window, 2)
    torch.testing.assert_close(actual[:2].double(), expected[:2], atol=1e-5, rtol=1e-5)
    assert actual.isfinite().all()


def test_queries_may_be_a_slice_of_a_fused_projection() -> None:
    case = Case([3, 1], [21, 17], heads=(4, 2))
    case.query = torch.cat([case.query, torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(0))], 1)[:, :4]
    assert not case.query.is_contiguous()
    case.check(True, None, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("num_queries", [30, 4])
def test_reference_equals_dense_attention(num_queries: int, window: int | None, causal: bool) -> None:
    case = Case([num_queries], [30], heads=(4, 2), block_size=8)
    k, v = case.cache[case.rows.block_tables[0].long()].flatten(0, 1)[:30].double().unbind(1)
    q, k, v = (x.transpose(0, 1)[None] for x in (case.query.double(), k, v))
    # By the definition, each query by itself.
    seen = torch.zeros(num_queries, 30, dtype=torch.bool)
    for index, position in enumerate(range(30 - num_queries, 30)):
        first = 0 if window is None else max(0, position - window + 1)
        last = position if causal else 29 if window is None else position + window - 1
        seen[index, first : last + 1] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(case.reference(causal, window), expected[0].transpose(0, 1).flatten(1))


QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)


def planned(
    query_lens: list[int], seq_len: int, shape: HeadShape = QWEN3_8B, window: int | None = None
) -> list[Launch]:
    return plan_launches(np.array(query_lens), np.full(len(query_lens), seq_len), shape, True, window, HOPPER)


def test_rows_of_a_captured_step_need_no_tile_table() -> None:
    (launch,) = planned([16] * 8, 1024)
    assert launch.tiles is None
    assert launch.num_tiles == 8


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_one_bound_that_need_several_tiles_have_no_tile_table_either(splits: int) -> None:
    case = Case([3, 2], [37, 20], query_bounds=[3, 3], heads=(8, 1))
    (launch,) = plan_launches(case.bounds, np.array(case.seq_lens), HeadShape(8, 1, 16, 4), True, None, HOPPER)
    assert launch.tiles is None
    assert launch.num_tiles == 4
    case.check(True, None, splits)


def test_every_query_is_in_one_tile() -> None:
    lens = [1, 300, 0, 16, 33, 700]
    seen = []
    for launch in planned(lens, 1024):
        assert launch.tiles is not None
        for row, first, last in launch.tiles.T.tolist():
            assert 0 < (last - first) * QWEN3_8B.group <= launch.tiling.block_m
            seen += [(row, query) for query in range(first, last)]
    assert sorted(seen) == [(row, query) for row, length in enumerate(lens) for query in range(length)]
