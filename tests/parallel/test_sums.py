"""The sum over ranks through shared memory. The ranks are threads, each with a mapping of its own."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dflash_backend.parallel.links import packed
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import SLOT_BYTES, SharedSum, sum_memory

pytestmark = pytest.mark.usefixtures("single_thread")
# Of one slot, a little more than one, and more than two.
SIZES = (1, 7, SLOT_BYTES // 4, SLOT_BYTES // 4 + 3, SLOT_BYTES * 5 // 8)


@pytest.fixture
def memory(size: int) -> Iterator[int]:
    descriptor = sum_memory(size)
    yield descriptor
    os.close(descriptor)


def terms(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What each rank gives."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_rank_gets_the_terms_in_the_order_of_ranks(memory: int, size: int, dtype: torch.dtype) -> None:
    given = [terms(size, (length,), dtype, seed) for seed, length in enumerate(SIZES)]

    def run(rank: int) -> list[torch.Tensor]:
        reduce = SharedSum(memory, Shard(rank, size))
        return [reduce(each[rank].clone()) for each in given]

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    for index, each in enumerate(given):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        expected = each[0].to(exact)
        for term in each[1:]:
            expected = expected + term.to(exact)
        assert all(torch.equal(found[index], expected.to(dtype)) for found in results)


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_alone_gets_what_each_has(memory: int, size: int) -> None:
    """Between sums, with ranks that are slow: none overwrites what rank 0 has not read."""
    given = [terms(size, (length // 5 + 1, 5), torch.float32, seed) for seed, length in enumerate(SIZES * 8)]
    deadline = time.monotonic() + 60

    def too_late() -> str:
        return "a rank has failed" if time.monotonic() > deadline else ""

    def run(rank: int) -> list[list[torch.Tensor]]:
        sums, delays = SharedSum(memory, Shard(rank, size), too_late), random.Random(rank)
        results = []
        for each in given:
            if delays.random() < 0.3:
                time.sleep(0.001)
            results.append(sums.gather(each[rank].t().contiguous().t()))
            assert torch.equal(sums(torch.ones(3)), torch.full((3,), float(size)))
        assert sums.num_bytes == sum(each[0].nbytes + 12 for each in given)
        return results

    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(run, range(size))
    for found, expected in zip(first, given, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(found == [] for each in others for found in each)


@pytest.mark.parametrize("size", [3])
def test_a_rank_that_is_slow_reads_what_was_given_for_its_sum(memory: int, size: int) -> None:
    given = [terms(size, (5, 4), torch.float32, seed) for seed in range(200)]

    def run(rank: int) -> list[torch.Tensor]:
        reduce, delays = SharedSum(memory, Shard(rank, size)), random.Random(rank)
        results = []
        for each in given:
            if delays.random() < 0.1:
                time.sleep(0.001)
            results.append(reduce(each[rank].clone()))
        return results

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    for index, each in enumerate(given):
        for found in results:
            assert torch.equal(found[index], each[0] + each[1] + each[2])


@pytest.mark.parametrize("size", [2])
def test_a_rank_that_waits_for_a_lost_one_says_why(memory: int, size: int) -> None:
    since = time.monotonic()
    reduce = SharedSum(memory, Shard(0, size), lambda: "rank 1 has ended" if time.monotonic() - since > 0.05 else "")
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        reduce(torch.ones(3))


@pytest.mark.parametrize("size", [2])
def test_a_tensor_that_is_not_contiguous_is_summed_as_it_is_seen(memory: int, size: int) -> None:
    def run(rank: int) -> torch.Tensor:
        return SharedSum(memory, Shard(rank, size))(torch.arange(12.0).view(3, 4).t())

    with ThreadPoolExecutor(size) as threads:
        for found in threads.map(run, range(size)):
            assert torch.equal(found, 2 * torch.arange(12.0).view(3, 4).t())


def test_of_a_view_only_what_it_shows_is_sent() -> None:
    table = torch.arange(1_000_000, dtype=torch.int32)
    data = packed({"tokens": table[5:9], "flags": torch.tensor([True, False])})
    assert len(data) < 2000
    found = pickle.loads(data)
    assert torch.equal(found["tokens"], table[5:9])
    assert found["flags"].tolist() == [True, False]
