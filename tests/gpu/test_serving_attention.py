"""Paged attention with the tiles, stages and splits that serving gets: bf16, heads of 64 and 128, against float64.

The kernel tests have small tiles, so that the interpreter can run them, and head sizes of all kinds; what a GPU serves
with is only here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dflash_kernels.attention_schedule import PagedBatch
from dflash_kernels.paged_attention import paged_attention, prepare_launches
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, plan_launches
from tests.kernels.inputs import DEVICE
from tests.kernels.test_paged_attention import TOLERANCE, Case, on_device

HEADS = [((8, 2), 64), ((8, 2), 128), ((8, 1), 128)]
LONG = 9000

# Rows by name: (queries, positions up to the last query) of each.
ROWS: dict[str, tuple[list[int], list[int]]] = {
    "a plain decode row": ([1], [LONG]),
    "one verification": ([16], [LONG]),
    "verifications of one length": ([16] * 8, [2048] * 8),
    "verifications of unlike lengths": ([16] * 8, [100, 250, 1000, 16, 4000, 31, LONG, 700]),
    "a prompt": ([300], [300]),
    "a chunk of a long prompt": ([300], [LONG]),
    "a prompt of many tiles": ([3000], [3000]),
    "prompts of one length": ([300] * 4, [300] * 4),
    "chunks beside verifications": ([300, 16, 1, 16, 77], [1300, 2048, 100, 33, 77]),
}


@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_tilings_that_serve(heads: tuple[int, int], head_dim: int, rows: str, causal: bool) -> None:
    case = Case(*ROWS[rows], heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    case.check(causal, None, small=False)


@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("window", [128, 2048])
def test_windows_with_the_tilings_that_serve(heads: tuple[int, int], head_dim: int, window: int) -> None:
    case = Case(*ROWS["chunks beside verifications"], heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    case.check(True, window, small=False)


@pytest.mark.parametrize("splits", [1, 2, 7, 33])
def test_any_number_of_splits_with_the_tilings_that_serve(splits: int) -> None:
    case = Case(*ROWS["verifications of unlike lengths"], heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    case.check(True, None, splits, small=False)


def replayable(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """A captured graph of `run` and the tensor that each replay writes; without a GPU, `run` itself."""
    output = run()
    if DEVICE == "cpu":
        return output, lambda: output.copy_(run())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return output, graph.replay


@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_a_captured_step_follows_the_lengths_of_each_replay(heads: tuple[int, int], head_dim: int) -> None:
    """Launched for the longest rows that there may be, with padding rows and blocks that change."""
    batch, bound = 6, LONG
    case = Case([16] * batch, [bound] * batch, heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    shape = HeadShape(*heads, head_dim, case.dtype.itemsize)
    launches = plan_launches(np.array([16] * batch), np.array([bound] * batch), shape, True, None, HOPPER, bound)
    tiled = [(launch, on_device(launch)) for launch in launches]
    r = case.rows
    rows = PagedBatch(*(t.to(DEVICE) for t in (r.query_start, r.query_lens, r.seq_lens, r.block_tables)))
    query, cache = case.query.to(DEVICE), case.cache.to(DEVICE)

    def attend() -> torch.Tensor:
        prepared = prepare_launches(tiled, rows, shape.group, case.block_size, True, None)
        return paged_attention(query, cache, rows, prepared, True, None)

    output, replay = replayable(attend)
    generator = torch.Generator().manual_seed(1)
    for query_lens, seq_lens in (
        ([16] * batch, [bound] * batch),
        ([16, 1, 0, 16, 5, 0], [16, 1, 0, bound, 40, 0]),
        ([16] * 5 + [0], [100, 2000, 33, 17, 5000, 0]),
    ):
        order = torch.randperm(r.block_tables.numel(), generator=generator).view_as(r.block_tables).int()
        for kept, now in ((r.query_lens, query_lens), (r.seq_lens, seq_lens)):
            kept.copy_(torch.tensor(now))
        r.block_tables.copy_(order)
        for there, here in ((rows.query_lens, r.query_lens), (rows.seq_lens, r.seq_lens), (rows.block_tables, order)):
            there.copy_(here)
        replay()
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(output.cpu().double(), case.reference(True, None), atol=tolerance, rtol=tolerance)
