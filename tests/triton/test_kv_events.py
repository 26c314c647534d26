"""Events of the prefix cache as a subscriber of vLLM's reads them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine_client import kv_publisher
from dflash_backend.engine_client.kv_publisher import KVEventPublisher, at_rank
from dflash_backend.messages import BlocksRemoved, BlocksStored
from tests.engine_client import toy_process
from tests.support.waiting import eventually
from tests.triton.serving import submit


# As vLLM declares them (distributed/kv_events.py), fields that have come since its 0.11 left out.
class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def free_address() -> str:
    """An address of this machine that was free a moment ago, as was the next one above it."""
    while True:
        with socket.socket() as one, socket.socket() as above:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                above.bind(("127.0.0.1", port + 1))
                return f"tcp://127.0.0.1:{port}"


def free_addresses() -> tuple[str, str]:
    """Two such, of which neither is the one above the other."""
    first = second = free_address()
    while abs(int(first.rpartition(":")[2]) - int(second.rpartition(":")[2])) < 2:
        second = free_address()
    return first, second


class Subscriber:
    """Reads batches in the way of vLLM's example."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)
        self.batches: list[KVEventBatch] = []
        self.numbers: list[int] = []

    def read(self) -> list[Any]:
        """All events so far."""
        while self.socket.poll(100):
            _, number, batch = self.socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            self.batches.append(DECODER.decode(batch))
        return [event for batch in self.batches for event in batch.events]


def replayed(endpoint: str, first: int) -> tuple[list[int], list[Any]]:
    """Ask for the batches from a number on, as a client of vLLM does."""
    with zmq.Context() as context, context.socket(zmq.REQ) as request:
        request.linger = 0
        request.connect(endpoint)
        request.send(first.to_bytes(8, "big"))
        numbers, events = [], []
        assert request.poll(5000)
        _, number, batch = request.recv_multipart()
        # A REQ socket drops what follows the first answer, so one more is enough to see where it ends.
        numbers.append(int.from_bytes(number, "big", signed=True))
        if batch:
            events += DECODER.decode(batch).events
        return numbers, events


def replayed_all(endpoint: str, first: int) -> list[int]:
    """The numbers of all that is replayed from one on, the end's -1 included."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        numbers: list[int] = []
        while -1 not in numbers:
            assert dealer.poll(5000)
            numbers.append(int.from_bytes(dealer.recv_multipart()[2], "big", signed=True))
        return numbers


@pytest.fixture
def publisher():
    endpoint, replay = free_address(), free_address()
    made = KVEventPublisher(endpoint, replay, "kv@here", 3, pytest.fail)
    made.endpoint, made.replay = endpoint, replay
    yield made
    made.close()


def test_events_are_in_the_format_that_vllms_subscribers_decode(publisher) -> None:
    subscriber = Subscriber(publisher.endpoint, "kv@")
    hashes = [bytes([7] * 24) + number.to_bytes(8, "big") for number in (1, 2, 2**64 - 1)]

    def publish() -> list[Any]:
        publisher.publish([BlocksStored(hashes[:2], None, [5] * 32), BlocksStored(hashes[2:], hashes[1], [6] * 16)], 16)
        publisher.publish([BlocksRemoved(hashes[1:])], 16)
        publisher.publish([BlocksStored(hashes[:1], medium="CPU"), BlocksRemoved(hashes[:1], "DISK")], 16)
        return subscriber.read()

    events = eventually(publish)
    assert events[-5:] == [
        BlockStored([1, 2], None, [5] * 32, 16, None, "GPU", None),
        BlockStored([2**64 - 1], 2, [6] * 16, 16, None, "GPU", None),
        BlockRemoved([2, 2**64 - 1], "GPU"),
        BlockStored([1], None, [], 16, None, "CPU", None),
        BlockRemoved([1], "DISK"),
    ]
    first = subscriber.numbers[0]
    assert subscriber.numbers == list(range(first, first + len(subscriber.numbers)))
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {3}


def test_who_subscribes_to_another_topic_gets_nothing(publisher) -> None:
    other, ours = Subscriber(publisher.endpoint, "other"), Subscriber(publisher.endpoint)
    eventually(lambda: publisher.clear() or ours.read())
    assert other.read() == []


def test_what_was_missed_is_replayed(publisher) -> None:
    for _ in range(4):
        publisher.clear()
    eventually(lambda: replayed_all(publisher.replay, 0) == [0, 1, 2, 3, 4, -1])
    assert replayed_all(publisher.replay, 3) == [3, 4, -1]
    assert replayed_all(publisher.replay, 9) == [-1]
    assert replayed(publisher.replay, 0) == ([0], [AllBlocksCleared()]), "a REQ socket is answered as well"


def test_an_address_in_use_is_said_once_and_taken_when_it_is_free(publisher) -> None:
    said: list[str] = []
    late = KVEventPublisher(publisher.endpoint, "", "", 0, said.append)
    eventually(lambda: said)
    subscriber = Subscriber(publisher.endpoint)
    publisher.close()
    publisher.close = lambda: None

    def is_heard() -> bool:
        late.clear()
        subscriber.read()
        return any(batch.data_parallel_rank == 0 for batch in subscriber.batches)

    eventually(is_heard)
    late.close()
    assert len(said) == 1
    assert "Address already in use" in said[0]


def test_without_its_address_a_publisher_keeps_what_is_replayed_and_no_more(
    publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 10)
    replay, said = free_address(), []
    late = KVEventPublisher(publisher.endpoint, replay, "", 0, said.append)
    for _ in range(50):
        late.clear()
    assert eventually(lambda: replayed_all(replay, 0) == [*range(41, 51), -1])
    assert len(said) == 1
    late.close()


def test_events_do_not_wait_for_the_address_of_the_replay(publisher) -> None:
    endpoint, said = free_address(), []
    other = KVEventPublisher(endpoint, publisher.replay, "", 0, said.append)
    subscriber = Subscriber(endpoint)
    assert eventually(lambda: other.clear() or subscriber.read())
    assert len(said) == 1
    assert publisher.replay in said[0]
    other.close()


def test_an_ipc_address_is_not_taken_from_the_publisher_that_has_it(tmp_path) -> None:
    endpoint, said = f"ipc://{tmp_path}/events", []
    first = KVEventPublisher(endpoint, "", "", 0, pytest.fail)
    subscriber = Subscriber(endpoint)
    assert eventually(lambda: first.clear() or subscriber.read())
    second = KVEventPublisher(endpoint, "", "", 1, said.append)
    assert eventually(lambda: said)
    assert "Address already in use" in said[0]
    first.close()
    assert eventually(lambda: second.clear() or (subscriber.read() and subscriber.batches[-1].data_parallel_rank))
    second.close()


def test_a_publisher_that_never_got_its_address_can_be_closed(publisher) -> None:
    KVEventPublisher(publisher.endpoint, "", "", 0, lambda text: None).close()


def test_a_publisher_whose_thread_has_ended_keeps_nobody_waiting(publisher) -> None:
    """As when it is closed, and the thread, which waits for its address, sees that before the last batch comes."""
    said: list[str] = []
    late = KVEventPublisher(publisher.endpoint, "", "", 0, said.append)
    eventually(lambda: said)
    late._ended.set()
    late._thread.join()
    with ThreadPoolExecutor(1) as threads:
        for _ in range(10):
            time.sleep(0.02)  # until it is known that nobody receives
            threads.submit(late.clear).result(timeout=10)
        threads.submit(late.close).result(timeout=10)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("tcp://*:5557", "tcp://*:5559"), ("ipc:///tmp/kv", "ipc:///tmp/kv_dp2"), ("", "")],
)
def test_each_engine_has_an_address_of_its_own(endpoint: str, expected: str) -> None:
    assert at_rank(endpoint, 2) == expected
    assert at_rank(endpoint, 0) == endpoint


@pytest.mark.parametrize("value", ["5557", "tcp://*", "http://localhost:5557", "inproc://kv"])
def test_an_address_that_cannot_be_one_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="'kv_events_endpoint' .*allowed: tcp://HOST:PORT"):
        EngineConfig.from_values({"kv_events_endpoint": value})


def test_a_service_publishes_what_its_engines_report_and_that_a_cache_is_gone(serve, triton) -> None:
    endpoint, replay = free_addresses()
    service = serve(
        data_parallel_size=2, kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay, kv_events_topic="kv@toy"
    )
    subscribers = [Subscriber(at_rank(endpoint, rank), "kv@toy") for rank in range(2)]

    def evict() -> list[int]:
        submit(service, [toy_process.EVICT, *range(1, 40)], max_tokens=2).all()
        heard = [any(isinstance(event, BlockRemoved) for event in one.read()) for one in subscribers]
        return [rank for rank in range(2) if heard[rank]]

    rank = eventually(evict)[0]
    where = subscribers[rank]
    assert {batch.data_parallel_rank for batch in where.batches} == {rank}
    known = len(where.read())
    os.kill(service._engines.supervisors[rank].engine.pid, signal.SIGKILL)
    assert eventually(lambda: where.read()[known:]) == [AllBlocksCleared()]
    assert replayed(at_rank(replay, 1), 0) == ([0], [AllBlocksCleared()])
    service.close()
    assert triton.values["dflash:kv_events_total",] >= 1


@pytest.mark.parametrize("num_batches", [0, 5000])
def test_what_is_published_before_the_thread_runs_is_not_lost(
    num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it waits for an address that another instance of the model still has."""
    may_run, run = threading.Event(), KVEventPublisher._run

    def late(self: KVEventPublisher, *arguments: Any) -> None:
        may_run.wait(30)
        run(self, *arguments)

    monkeypatch.setattr(KVEventPublisher, "_run", late)
    endpoint, replay = free_addresses()
    publisher = KVEventPublisher(endpoint, replay, "", 0, pytest.fail)
    for _ in range(num_batches):
        publisher.clear()
    may_run.set()
    eventually(lambda: replayed_all(replay, 0) == [*range(num_batches + 1), -1])
    publisher.close()
