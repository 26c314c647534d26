"""The work of an attention launch is shared out evenly by the rows' real lengths, and what comes out is attention."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.balance import balance
from dflash_kernels.attention_schedule import PagedBatch, num_shared, schedule, share_reference
from dflash_kernels.paged_attention_launch import HOPPER, HeadShape, Launch, plan_launches
from tests.kernels.inputs import DEVICE
from tests.kernels.test_paged_attention import Case, on_device
from tests.support.scale import scaled

QWEN3_8B = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
MAX_LEN, NUM_SMS, BLOCK_SIZE = 40960, 132, 16
LONG_ROW, SHORT_ROW = 32768, 1024


def captured(batch: int, width: int = 16) -> Launch:
    """The launch of a graph for rows of any length."""
    bounds = np.full(batch, width), np.full(batch, MAX_LEN)
    (launch,) = plan_launches(*bounds, QWEN3_8B, True, None, HOPPER, max_overestimate=MAX_LEN)
    return launch


def scheduled(
    launch: Launch, query_lens: list[int], seq_lens: list[int], causal: bool = True, window: int | None = None
) -> tuple[int, np.ndarray, np.ndarray]:
    """The share of a worker, the units of each tile, and the table of tiles, as the device has them."""
    columns = (np.zeros(len(seq_lens)), query_lens, seq_lens)
    lens = (torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns)
    rows = PagedBatch(*lens, torch.zeros(len(seq_lens), MAX_LEN // BLOCK_SIZE, dtype=torch.int32, device=DEVICE))
    numbers = schedule(rows, launch, on_device(launch), QWEN3_8B.group, BLOCK_SIZE, causal, window).cpu().numpy()
    ends = numbers[1 : 1 + launch.num_tiles]
    tiles, shared = np.split(numbers[1 + launch.num_tiles :], [3 * launch.num_tiles])
    share, units = int(numbers[0]), np.diff(ends, prepend=0)
    found = [entry for entry in shared.reshape(3, -1).T.tolist() if entry[0] >= 0]
    assert found == shared_tiles(share, units)
    assert (shared[len(found) : num_shared(launch.num_tiles, launch.num_workers)] == -1).all()
    return share, units, tiles.reshape(3, -1)


def shared_tiles(share: int, units: np.ndarray) -> list[list[int]]:
    """The tiles that workers share, each with the first and the last of these, found unit by unit."""
    owners: dict[int, set[int]] = {}
    for unit, tile in enumerate(np.repeat(np.arange(len(units)), units).tolist()):
        owners.setdefault(tile, set()).add(unit // share)
    return [[tile, min(workers), max(workers)] for tile, workers in owners.items() if len(workers) > 1]


def loads(share: int, units: np.ndarray, num_workers: int) -> np.ndarray:
    """Units of each worker."""
    return np.clip(units.sum() - np.arange(num_workers) * share, 0, share)


@pytest.mark.parametrize("batch", [4, 5, 8, 16, 24, 32, 48, 64])
def test_one_long_row_among_short_ones_keeps_no_worker_longer_than_the_others(batch: int) -> None:
    launch = captured(batch)
    share, units, _ = scheduled(launch, [16] * batch, [LONG_ROW] + [SHORT_ROW] * (batch - 1))
    assert units.sum() * launch.tiling.block_n == LONG_ROW + SHORT_ROW * (batch - 1)
    busy = loads(share, units, launch.num_workers)
    assert busy.sum() == units.sum()
    assert busy.max() <= 1.3 * units.sum() / launch.num_workers


@pytest.mark.parametrize("seed", range(20))
def test_any_lengths_are_shared_out_evenly(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.choice([2, 9, 31, 64])
    launch = captured(batch)
    seq_lens = [rng.choice([16, 100, 1000, 5000, 40000]) for _ in range(batch)]
    share, units, _ = scheduled(launch, [16] * batch, seq_lens)
    assert loads(share, units, launch.num_workers).max() <= max(1.3 * units.sum() / launch.num_workers, 2)


@pytest.mark.parametrize(("batch", "length"), [(32, 2048), (16, 2048), (64, 2048), (128, 4096), (8, 100)])
def test_rows_of_one_length_are_cut_into_equal_pieces_or_not_at_all(batch: int, length: int) -> None:
    share, units, _ = scheduled(captured(batch), [16] * batch, [length] * batch)
    assert share % units[0] == 0 or units[0] % share == 0


def test_a_context_is_not_cut_into_pieces_that_cost_more_than_they_save() -> None:
    launch = captured(1)
    fewest = launch.tiling.min_chunk // launch.tiling.block_n
    for length, share in ((40, 1), (128, fewest), (1024, fewest), (LONG_ROW, 16)):
        assert scheduled(launch, [16], [length])[0] == share


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 300])
def test_the_device_schedules_what_the_reference_does(causal: bool, window: int | None) -> None:
    """Ragged rows over a table of tiles, with padding, short rows and prefill chunks, and more tiles than a block of
    the kernel has."""
    query_bounds, query_lens = [700, 3, 16, 9000, 5], [700, 0, 2, 8999, 0]
    seq_lens = [2000, 500, 40, 9500, 0]
    for launch in plan_launches(np.array(query_bounds), np.array(seq_lens), QWEN3_8B, causal, window, HOPPER):
        launch = replace(launch, num_workers=max(launch.num_workers, 5))
        share, units, tiles = scheduled(launch, query_lens, seq_lens, causal, window)
        assert launch.tiles is not None
        expected = []
        for row, first, last in launch.tiles.T.tolist():
            last_query = min(last, query_lens[row])
            positions = range(seq_lens[row] - query_lens[row] + first, seq_lens[row] - query_lens[row] + last_query)
            begin = 0 if window is None or not positions else max(positions[0] - window + 1, 0)
            end = positions[-1] + 1 if causal and positions else seq_lens[row]
            if window is not None and positions:
                end = min(end, positions[-1] + window)
            expected.append(max(-(-(end - begin) // launch.tiling.block_n), 1) if positions else 0)
        # Tiles without queries are left out, and nothing is behind the last one.
        there = np.array(expected) > 0
        assert there[0] == (len(there) > 5), "the first of the short rows has none"
        assert tiles[:, : there.sum()].tolist() == launch.tiles[:, there].tolist()
        assert units.tolist() == [n for n in expected if n] + [0] * int((~there).sum())
        fewest = launch.tiling.min_chunk // launch.tiling.block_n
        assert share == share_reference(units, launch.num_workers, fewest)


@pytest.mark.parametrize("seed", range(scaled(16, at_least=4)))
def test_any_rows_and_any_number_of_workers_give_attention(seed: int) -> None:
    """Pieces end within tiles, at their ends, and over several tiles; some rows are padding."""
    rng = random.Random(seed)
    bound = rng.choice([1, 3, 17])
    query_lens = [rng.randint(0, bound) for _ in range(rng.randint(1, 6))]
    seq_lens = [rng.randint(count, 150) if count else 0 for count in query_lens]
    equal = [bound] * len(query_lens) if rng.random() < 0.5 else None
    heads = rng.choice([(1, 1), (4, 2), (3, 1)])
    if max(seq_lens) == 0:
        query_lens[0], seq_lens[0] = 1, 5
    case = Case(query_lens, seq_lens, query_bounds=equal, packed=True, heads=heads)
    case.check_shares(rng.choice([1, 2, 3, 7, 19]), rng.random() < 0.5, rng.choice([None, None, 9]))


def test_the_printed_balance_says_what_the_device_does() -> None:
    lengths = np.array([LONG_ROW] + [SHORT_ROW] * 31)
    mean, splits, before, after = balance(lengths)
    share, _, _ = scheduled(captured(32), [16] * 32, lengths.tolist())
    assert after == share * captured(32).tiling.block_n <= 1.3 * mean
    assert (splits, before) == (1, LONG_ROW), "from bounds alone the long row has one program for each KV head"
