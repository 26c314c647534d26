"""Sums of ranks on GPUs: equal bits, an order where one is asked for, and no wait for a rank that is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from dflash_backend.parallel import nccl
from dflash_backend.parallel.gpu import ALIGNMENT, DeviceMessages
from dflash_backend.parallel.nccl import Collectives, GpuSum
from dflash_backend.parallel.shard import Shard
from tests.parallel.thread_ranks import CPU, Exchange, ThreadCollectives


class OffByAnUlp(ThreadCollectives):
    """A sum that rank 1 has with other bits."""

    def sum(self, x: torch.Tensor) -> None:
        super().sum(x)
        if self._own == 1:
            x.copy_(torch.nextafter(x, torch.full_like(x, torch.inf)))


class FromTheLast(ThreadCollectives):
    """A sum that adds the terms in another order."""

    def sum(self, x: torch.Tensor) -> None:
        terms = self._exchange.all_of(self._own, "sum", x)[::-1]
        x.copy_(sum(terms[1:], start=terms[0]))


def on_all(size: int, ordered: bool = False, kind: Any = ThreadCollectives, exchange: Exchange | None = None) -> Any:
    """What each rank has of the sum of terms of its own, and of a gather of them."""
    exchange = exchange or Exchange(size)

    def of_rank(own: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sums = GpuSum(Shard(own, size), CPU, lambda: kind(exchange, own), ordered)
        try:
            sums.join()
        except RuntimeError:
            exchange.end()  # no other rank waits for this one
            raise
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(40 + own))
        given = sums.gather(x)
        return sums(x.clone()), given

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_have_the_sum_and_rank_0_what_each_gave(size: int) -> None:
    (total, terms), *others = on_all(size)
    assert torch.allclose(total, torch.stack(terms).sum(0))
    assert len(terms) == size
    for sums, given in others:
        assert torch.equal(sums, total)
        assert given == []


def test_terms_are_added_in_the_order_of_ranks_where_bits_may_not_depend_on_the_batch() -> None:
    for ordered, kind in ((True, FromTheLast), (True, ThreadCollectives)):
        (total, (a, b, c, d)), *_ = on_all(4, ordered, kind)
        assert torch.equal(total, ((a + b) + c) + d)
    (total, (a, b, c, d)), *_ = on_all(4, False, FromTheLast)
    assert not torch.equal(total, ((a + b) + c) + d)


def test_two_terms_have_no_order_and_are_not_gathered() -> None:
    exchange = Exchange(2)
    on_all(2, ordered=True, exchange=exchange)
    assert exchange.log[0][-1] == ("sum", 7 * 33 * 4)


def test_ranks_meet_with_an_exchange_of_each_kind_before_a_graph_may_have_one() -> None:
    exchange = Exchange(2)
    on_all(2, exchange=exchange)
    assert {kind for kind, _ in exchange.log[0][:6]} == {"broadcast", "sum", "gather"}


def test_sums_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has other bits on some ranks"):
        on_all(2, kind=OffByAnUlp)


def waiting(connected: threading.Event) -> GpuSum:
    def connect() -> Collectives:
        connected.wait()
        raise RuntimeError("ended")

    return GpuSum(Shard(0, 2), CPU, connect)


def test_a_rank_that_is_lost_or_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LOOK_S", 0.01)
    event = threading.Event()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        waiting(event).join(lambda: "rank 1 has ended")
    monkeypatch.setattr(nccl, "JOIN_S", 0.02)
    with pytest.raises(RuntimeError, match="did not find each other by NCCL within 0.02 s: .*NCCL_SOCKET_IFNAME"):
        waiting(event).join()
    event.set()
    with pytest.raises(RuntimeError, match="did not find each other by NCCL: ended"):
        waiting(event).join()


class Hanging:
    """As `Collectives`, whose work ends when it is told to, or never."""

    def __init__(self, ends: bool) -> None:
        self.ended = threading.Event()
        self._ends = ends

    def abort(self) -> None:
        if self._ends:
            self.ended.set()
        else:
            threading.Event().wait(5)


def test_work_that_waits_for_a_lost_rank_is_ended_or_the_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(nccl.os, "_exit", codes.append)
    monkeypatch.setattr(nccl, "ABORT_S", 0.05)
    for ends in (True, False):
        sums = GpuSum(Shard(0, 2), CPU, lambda: None)  # type: ignore[arg-type, return-value]
        sums.abort()  # before there is a group there is nothing to end
        sums._group = group = Hanging(ends)  # type: ignore[assignment]
        sums.abort()
        assert group.ended.is_set() is ends
    assert codes == [1]


def test_a_messages_tensors_are_broadcast_at_once_and_aligned() -> None:
    """Twice the same tensor goes once; what has no tensors of the device takes no exchange."""
    exchange, sent = Exchange(2), []
    rows = torch.arange(5, dtype=torch.int32)
    flags = torch.tensor([True, False, True])
    wide = torch.arange(12).view(3, 4)[:, 1:3]
    messages = [{"rows": rows, "flags": flags, "again": rows, "wide": wide, "empty": torch.empty(0, 3)}, ("none", 3)]

    def rank_0() -> None:
        mine = DeviceMessages(ThreadCollectives(exchange, 0), CPU)
        for message in messages:
            mine.send(message, sent.append)

    def rank_1() -> list[Any]:
        mine, before = DeviceMessages(ThreadCollectives(exchange, 1), CPU), []
        found = []
        for number in range(2):
            while len(sent) <= number:
                pass
            found.append(mine.received(sent[number], partial(before.append, number)))
        assert before == [0]
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(rank_0), threads.submit(rank_1)
        first.result()
        got, none = second.result()
    assert none == ("none", 3)
    assert got["again"] is got["rows"]
    for name in ("rows", "flags", "wide", "empty"):
        assert torch.equal(got[name], messages[0][name])  # type: ignore[call-overload]
        assert got[name].dtype == messages[0][name].dtype  # type: ignore[call-overload]
    assert exchange.log == [[("broadcast", 3 * ALIGNMENT)]] * 2
