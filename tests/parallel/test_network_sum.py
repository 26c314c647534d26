"""The sum over ranks through a network: the bits of `SharedSum`, and an error where a rank does not come."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_backend.parallel import sums as sums_module
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import NetworkSum, SumError
from tests.parallel.test_sums import terms
from tests.support.ipv6 import needs_ipv6

pytestmark = pytest.mark.usefixtures("single_thread")
HOST = "127.0.0.1"


def joined(size: int, host: str = HOST, **rank_0) -> list[NetworkSum]:
    """The sums of all ranks, in one process."""
    sums = [NetworkSum(Shard(rank, size), **(rank_0 if rank == 0 else {})) for rank in range(size)]
    port = sums[0].serve_store(host)
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda each: each.join(host, host, port), sums))
    return sums


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_rank_gets_the_terms_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    given = [terms(size, shape, dtype, seed) for seed, shape in enumerate([(1,), (7, 3), (3, 6_001), (2_200_003,)])]
    sums = joined(size)

    def run(rank: int) -> list[torch.Tensor]:
        return [sums[rank](each[rank].clone()) for each in given]

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(run, range(size)))
    for index, each in enumerate(given):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        expected = each[0].to(exact)
        for term in each[1:]:
            expected = expected + term.to(exact)
        assert all(torch.equal(found[index], expected.to(dtype)) for found in results)
    assert sums[0].num_bytes == sum(each[0].nbytes for each in given)


def test_ranks_of_nodes_with_ipv6_addresses_meet() -> None:
    needs_ipv6()
    sums = joined(2, "::1")
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda each: each(torch.ones(3)), sums))
    assert all(torch.equal(found, torch.full((3,), 2.0)) for found in results)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rank_0_alone_gets_what_each_has(size: int, dtype: torch.dtype) -> None:
    given = [terms(size, shape, dtype, seed) for seed, shape in enumerate([(1,), (7, 3), (1_100_003, 2)])]
    sums = joined(size)

    def run(rank: int) -> list[list[torch.Tensor]]:
        return [
            sums[rank].gather(each[rank].t().contiguous().t() if each[rank].dim() == 2 else each[rank])
            for each in given
        ]

    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(run, range(size))
    for found, expected in zip(first, given, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(found == [] for each in others for found in each)
    assert sums[0].num_bytes == sum(each[0].nbytes for each in given)


def test_a_rank_that_does_not_come_to_a_gather_is_an_error() -> None:
    since = time.monotonic()
    sums = joined(2, lost=lambda: "rank 1 has ended" if time.monotonic() - since > 0.6 else "")
    with pytest.raises(SumError, match="rank 1 has ended"):
        sums[0].gather(torch.ones(3))


def test_a_tensor_that_is_not_contiguous_is_summed_as_it_is_seen() -> None:
    sums = joined(2)
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda each: each(torch.arange(12.0).view(3, 4).t()), sums):
            assert torch.equal(found, 2 * torch.arange(12.0).view(3, 4).t())


class Late:
    """A sum that is complete just after a wait for it has given up."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, limit: timedelta) -> None:
        if not self._work.is_completed():
            self._work.wait(timedelta(seconds=10))
            raise RuntimeError("Operation timed out!")
        self._work.wait(limit)


def test_a_sum_that_is_complete_when_a_wait_for_it_gives_up_is_no_error() -> None:
    sums = joined(2)
    group = sums[0]._group
    sums[0]._group = SimpleNamespace(allgather=lambda *terms: Late(group.allgather(*terms)))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(lambda: (time.sleep(0.1), sums[1](torch.ones(3)))[1])
        assert torch.equal(sums[0](torch.ones(3)), torch.full((3,), 2.0))
        assert torch.equal(other.result(), torch.full((3,), 2.0))


def test_a_sum_that_fails_since_the_other_rank_has_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "SUM_S", 5.0)
    sums = joined(2)
    gone = sums.pop()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(sums[0], torch.ones(3))
        time.sleep(0.1)
        del gone  # which closes its connections
        with pytest.raises(SumError, match="a sum over the ranks failed: .*Connection closed by peer"):
            found.result()


def test_a_rank_that_waits_for_a_lost_one_says_why() -> None:
    since = time.monotonic()
    sums = joined(2, lost=lambda: "rank 1 has ended" if time.monotonic() - since > 0.6 else "")
    with pytest.raises(SumError, match="rank 1 has ended"):
        sums[0](torch.ones(3))
    assert time.monotonic() - since < 10


def test_a_rank_that_does_not_come_to_a_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "SUM_S", 0.7)
    sums = joined(2, cause=lambda: "rank 1 has gone elsewhere")
    with pytest.raises(SumError, match="rank 1 has gone elsewhere"):
        sums[0](torch.ones(3))
    with pytest.raises(SumError, match=r"did not come to a sum within 0.7 s"):
        (others := joined(2))[0](torch.ones(3))
    assert len(others) == 2  # the other one was there, and had nothing to add


def test_ranks_that_do_not_find_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "JOIN_S", 1.0)
    alone = NetworkSum(Shard(0, 2))
    port = alone.serve_store(HOST)
    with pytest.raises(SumError, match="did not find each other within 1 s"):
        alone.join(HOST)
    del alone
    with pytest.raises(SumError, match="did not find each other within 1 s"):
        NetworkSum(Shard(1, 2)).join(HOST, HOST, port)
