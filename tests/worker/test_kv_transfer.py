"""KV that comes from another server is that server's, whole, or is not used; and a decode server answers what one
server answers. Over loopback, in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from checks.core_state import check_core
from dflash_backend.config import ConfigError
from dflash_backend.core.moves import DEVICE, REMOTE, Kept, Move, Moved, Peer, Record
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.engine.llm import LLM
from dflash_backend.messages import GenerationRequest, KVTransferParams, SamplingParams, TokenDelta
from dflash_backend.worker import kv_transfer
from dflash_backend.worker.kv_mover import BackgroundMover, DeviceRecords
from dflash_backend.worker.kv_transfer import Facts, Memory, NixlAgent, RemoteRecords, TransferError, TransferServer
from tests.support.ipv6 import needs_ipv6
from tests.support.scale import by_night
from tests.worker.engines import engine
from tests.worker.test_kv_tiers import ASKED, CASES, COMMON, prompts

pytestmark = pytest.mark.usefixtures("single_thread")

HOST = "127.0.0.1"
FACTS = Facts(b"f" * 32, 16, 512, "target", "drafter")
NUM_SLOTS, SIZES = 8, (48, 12)
HASHES = [bytes([number]) * 32 for number in range(NUM_SLOTS)]
KEY = HASHES[3]


def device(fill: int) -> DeviceRecords:
    """Two groups: one of two tensors with two layers, and one of one."""
    generator = torch.Generator().manual_seed(fill)
    shapes = ((2, NUM_SLOTS, 16), (2, NUM_SLOTS, 8), (1, NUM_SLOTS, 12))
    tensors = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    return DeviceRecords([(tensors[:2], 0), (tensors[2:], 0)])


def content(records: DeviceRecords, group: int, slot: int) -> bytes:
    into = np.zeros(SIZES[group], np.uint8)
    return records.read(Record(group, b"", slot, 0), into).tobytes()


def kept(number: int = 1) -> Kept:
    """Blocks 0 to 3 at slots 7 to 4, and the state after the last at slot 5."""
    blocks = [Record(0, HASHES[index], 7 - index, 0) for index in range(4)]
    return Kept(number, KEY, (*blocks, Record(1, HASHES[3], 5, 0)))


class Reader:
    """A decode server's device and mover."""

    def __init__(self, facts: Facts = FACTS, agent: Any = None, *peers: str) -> None:
        self.device = device(2)
        records = RemoteRecords(facts, SIZES, agent, frozenset(peers))
        self.mover = BackgroundMover(self.device, {REMOTE: records})

    def submit(self, port: int, move_id: int = 1, indices: tuple[int, ...] = (1, 2, 3)) -> None:
        """Read blocks to slots of their own indices, and the state to slot 6."""
        records = [Record(0, HASHES[index], 0, index) for index in indices]
        records += [Record(1, HASHES[3], 0, 6)] if indices else []
        self.mover.submit(Move(move_id, REMOTE, DEVICE, tuple(records), Peer(HOST, port, KEY)))

    def moved(self) -> Moved:
        self.mover.wait(20.0)
        (one,) = self.mover.finished()
        return one

    def read(self, port: int, **changes: Any) -> Moved:
        self.submit(port, **changes)
        return self.moved()


@pytest.fixture
def server() -> Iterator[TransferServer]:
    one = TransferServer(device(1), FACTS, (HOST, 0))
    yield one
    one.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    one = Reader()
    yield one
    one.mover.close()


def agents() -> tuple[Any, Any, DeviceRecords]:
    """NIXL's of a keeper and of a reader, and the keeper's device."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    keeper = device(1)
    return NixlAgent(keeper), NixlAgent(device(3)), keeper


def test_nixl_has_no_thread_that_takes_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Agent:
        def __init__(self, name: str, config: dict[str, Any]) -> None:
            asked.append(config)

        def register_memory(self, regions: Any, kind: str) -> None:
            assert kind == "DRAM"

        def get_agent_metadata(self) -> bytes:
            return b"who"

        def get_new_notifs(self) -> None:
            asked.append("progress")

    monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(nixl_agent=Agent, nixl_agent_config=dict))
    agent = NixlAgent(device(1))
    agent.progress()
    assert asked == [{"enable_prog_thread": False, "backends": ["UCX"]}, "progress"]
    assert agent.memory.metadata == b"who"


def test_a_read_by_nixl_that_hangs_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()

    class Agent:
        def __init__(self, *args: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *args: b"m" if name == "get_agent_metadata" else None

        def transfer(self, handle: None) -> str:
            return "PROC"

        def check_xfer_state(self, handle: None) -> str:
            hangs.set()
            return "PROC"

    monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(nixl_agent=Agent, nixl_agent_config=dict))
    server = TransferServer(device(1), FACTS, (HOST, 0), NixlAgent(device(1)))
    reader = Reader(FACTS, NixlAgent(device(3)))
    server.keep(kept())
    server.ready(1)
    reader.submit(server.port)
    assert hangs.wait(5.0)
    began = time.monotonic()
    reader.mover.cancel(frozenset({1}))
    assert time.monotonic() - began < 2.0
    assert reader.moved().arrived == (False,) * 4
    reader.mover.close()
    server.close()


@pytest.mark.parametrize("layers_and_bytes", [[(1 << 60, 1)], [(2, SIZES[0]), (-1, SIZES[0])], [(1, 96), (1, -48)], []])
def test_memory_of_another_length_than_a_record_is_not_read(layers_and_bytes: list[tuple[int, int]]) -> None:
    parts = [kv_transfer.Part(0, num_layers, 1, 1, num_bytes) for num_layers, num_bytes in layers_and_bytes]
    memory = Memory(b"", [parts] if parts else [], "DRAM", 0)
    with pytest.raises(TransferError, match="its records have another length"):
        kv_transfer.read_record(cast(NixlAgent, None), memory, "peer", threading.Event(), 0, 0, SIZES[0])


class HelpedTransport:
    """As NIXL's over a network that needs the keeper's help, on both sides: a record comes once it has helped."""

    name = "nixl"
    is_broken = False
    memory = Memory(b"", [], "DRAM", 0)

    def __init__(self, keeper: DeviceRecords) -> None:
        self._keeper, self._helped = keeper, threading.Semaphore(0)

    def progress(self) -> None:
        self._helped.release()

    def reader(self, memory: Memory, stopped: threading.Event) -> kv_transfer.ReadRecord:
        return self.read

    def read(self, group: int, slot: int, size: int) -> np.ndarray:
        if not self._helped.acquire(timeout=5):
            raise TransferError("nobody helps")
        return np.frombuffer(content(self._keeper, group, slot), np.uint8)


def transports(name: str) -> tuple[Any, Any, DeviceRecords]:
    """Of a keeper and of a reader, and the keeper's device."""
    if name == "nixl":
        return agents()
    keeper = device(1)
    helped = HelpedTransport(keeper) if name == "helped" else None
    return helped, helped, keeper


@pytest.mark.parametrize("transport", ["tcp", "helped", "nixl"])
def test_what_is_kept_comes_whole_and_is_kept_no_more(transport: str) -> None:
    own, others, keeper = transports(transport)
    server, reader = TransferServer(keeper, FACTS, (HOST, 0), own), Reader(agent=others)
    server.keep(kept())
    reader.submit(server.port)
    reader.mover.wait(0.05)
    assert reader.mover.finished() == [], "its last step has not drafted"
    server.ready(1)
    moved = reader.moved()
    assert moved.arrived == (True, True, True, True)
    assert moved.num_bytes == 3 * SIZES[0] + SIZES[1]
    for index in (1, 2, 3):
        assert content(reader.device, 0, index) == content(keeper, 0, 7 - index)
    assert content(reader.device, 1, 6) == content(keeper, 1, 5)
    assert server.taken() == [1]
    assert reader.read(server.port, move_id=2).arrived == (False,) * 4
    reader.mover.close()
    server.close()


def test_a_server_with_an_ipv6_address_is_read(reader: Reader) -> None:
    needs_ipv6()
    with contextlib.closing(TransferServer(device(1), FACTS, ("::1", 0))) as one:
        one.keep(kept())
        one.ready(1)
        block = Record(0, HASHES[1], 0, 1)
        reader.mover.submit(Move(1, REMOTE, DEVICE, (block,), Peer("::1", one.port, KEY)))
        assert reader.moved().arrived == (True,)
    assert content(reader.device, 0, 1) == content(device(1), 0, 6)


def test_a_reader_that_needs_nothing_says_so(server: TransferServer, reader: Reader) -> None:
    server.keep(kept())
    server.ready(1)
    assert reader.read(server.port, indices=()).arrived == ()
    assert server.taken() == [1]


def test_a_record_that_is_not_kept_does_not_come_and_the_others_do(server: TransferServer, reader: Reader) -> None:
    server.keep(kept())
    server.ready(1)
    moved = reader.read(server.port, indices=(2, 5, 3))
    assert (moved.arrived, moved.missing) == ((True, False, True, True), frozenset({1}))
    assert content(reader.device, 0, 3) == content(device(1), 0, 4)


def test_what_is_given_up_while_it_is_read_is_not_used(
    server: TransferServer, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send_records = server._send_records
    monkeypatch.setattr(server, "_send_records", lambda *args: (send_records(*args), server.withdraw(1)))
    server.keep(kept())
    server.ready(1)
    with caplog.at_level(logging.WARNING):
        assert reader.read(server.port).arrived == (False,) * 4
    assert "it was given up while it was read" in caplog.text
    assert server.taken() == []


def test_what_takes_the_place_of_what_was_given_up_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = device(1)
    server, read, num_read = TransferServer(keeper, FACTS, (HOST, 0)), keeper.read, 0
    first = content(keeper, 0, 6)

    def give_up_then_read(record: Record, into: np.ndarray) -> np.ndarray:
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            server.withdraw(1)
            keeper.parts[0][0].fill_(7)
        return read(record, into)

    monkeypatch.setattr(keeper, "read", give_up_then_read)
    server.keep(kept())
    server.ready(1)
    with socket.create_connection((HOST, server.port)) as connection:
        asked = [(0, HASHES[index]) for index in (1, 2, 3)]
        kv_transfer.send(connection, kv_transfer.Ask(FACTS, KEY, asked, "tcp"))
        until = time.monotonic() + 5
        assert kv_transfer.receive(connection, kv_transfer.Found, until).slots == [6, 5, 4]
        came = bytearray(3 * SIZES[0])
        kv_transfer.receive_into(connection, memoryview(came), until)
        kv_transfer.send(connection, kv_transfer.HasRead())
        assert not kv_transfer.receive(connection, kv_transfer.WasKept, until).is_kept
    assert came == first + bytes(2 * SIZES[0])
    server.close()


def test_a_reader_that_reads_too_slowly_is_left(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_transfer, "MAX_READ_S", -1.0)
    server.keep(kept())
    server.ready(1)
    with socket.create_connection((HOST, server.port)) as connection, caplog.at_level(logging.INFO):
        kv_transfer.send(connection, kv_transfer.Ask(FACTS, KEY, [(0, HASHES[1])], "tcp"))
        until = time.monotonic() + 5
        kv_transfer.receive(connection, kv_transfer.Found, until)
        assert connection.recv(1) == b""
        while "it reads too slowly" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.001)


DIFFERENCES = {
    "kv_block_size is 16 on the server that keeps the KV, and 32 on the one": {"kv_block_size": 32},
    "the length of dynamic rope (max_model_len) is 0 on the server that keeps the KV": {"rope_length": 1024},
    "the version of the code is '' on the server that keeps the KV, and '0123'": {"code": "0123"},
    "target is 'target' on the server that keeps the KV, and 'other'": {"target": "other"},
    "drafter is 'drafter' on the server that keeps the KV, and ''": {"drafter": ""},
    "weights, dtypes or devices of the two servers differ": {},
}


@pytest.mark.parametrize("sentence", DIFFERENCES)
def test_servers_that_differ_say_in_what(
    sentence: str, server: TransferServer, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(msgspec.structs.replace(FACTS, fingerprint=b"g" * 32, **DIFFERENCES[sentence]))
    server.keep(kept())
    server.ready(1)
    with caplog.at_level(logging.WARNING):
        assert reader.read(server.port).arrived == (False,) * 4
    assert f"KV of {HOST}:{server.port} is not used, and is computed here: {sentence}" in caplog.text
    reader.mover.close()


def test_a_decode_server_connects_to_the_peers_that_it_is_given_alone(
    server: TransferServer, caplog: pytest.LogCaptureFixture
) -> None:
    for peers, expected in (
        (("10.0.0.1", f"{HOST}:{server.port + 1}"), False),
        (("10.0.0.1", f"{HOST}:{server.port}"), True),
        ((HOST,), True),
    ):
        server.keep(kept())
        server.ready(1)
        reader = Reader(FACTS, None, *peers)
        assert reader.read(server.port).arrived == (expected,) * 4
        reader.mover.close()
        assert server.taken() == [1] * expected
    assert "it is not among kv_transfer_peers" in caplog.text


@pytest.mark.parametrize(
    ("peers", "host", "trusted"),
    [
        ((), "127.0.0.1", True),
        ((), "127.9.8.7", True),
        ((), "localhost", True),
        ((), "::1", True),
        ((), "10.0.0.1", False),
        ((), "127.0.0.1.example.org", False),
        ((), "127.1", False),
        (("*",), "10.0.0.1", True),
        (("prefill",), "127.0.0.1", False),
    ],
)
def test_other_machines_are_trusted_where_they_are_named(peers: tuple[str, ...], host: str, trusted: bool) -> None:
    assert RemoteRecords(FACTS, SIZES, None, frozenset(peers)).trusts(Peer(host, 7000, KEY)) is trusted


def test_a_folders_name_and_a_longer_context_are_no_difference(server: TransferServer) -> None:
    reader = Reader(msgspec.structs.replace(FACTS, target="another folder", max_model_len=1024))
    server.keep(kept())
    server.ready(1)
    assert reader.read(server.port).arrived == (True,) * 4
    reader.mover.close()


def _silent(connection: socket.socket) -> None:
    time.sleep(0.5)


def _closes(connection: socket.socket) -> None:
    connection.recv(100)


def _garbage(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def _wrong_count(connection: socket.socket) -> None:
    kv_transfer.send(connection, kv_transfer.Found([1, 2]))


def _half_a_record(connection: socket.socket) -> None:
    kv_transfer.send(connection, kv_transfer.Found([7, 6, 5, 4]))
    connection.sendall(b"x" * (SIZES[0] + 5))


def _drips(connection: socket.socket) -> None:
    kv_transfer.send(connection, kv_transfer.Found([7, 6, 5, 4]))
    for _ in range(200):  # until the reader has had enough
        connection.sendall(b"x")
        time.sleep(0.05)


def _no_word_in_the_end(connection: socket.socket) -> None:
    kv_transfer.send(connection, kv_transfer.Found([7, 6, 5, 4]))
    connection.sendall(b"x" * (3 * SIZES[0] + SIZES[1]))
    kv_transfer.receive(connection, kv_transfer.HasRead, time.monotonic() + 5)


def _nested_too_deeply_in_the_end(connection: socket.socket) -> None:
    _no_word_in_the_end(connection)
    nested = b"\x81\xa1a" + b"\x91" * 10_000 + b"\xc0"
    connection.sendall(struct.pack("<Q", len(nested)) + nested)


@pytest.mark.parametrize(
    "says",
    [
        *(_silent, _closes, _garbage, _wrong_count, _half_a_record, _drips, _no_word_in_the_end),
        _nested_too_deeply_in_the_end,
    ],
)
def test_a_server_that_fails_or_lies_gives_nothing_and_holds_up_nobody(
    says: Callable[[socket.socket], None], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "IO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(kv_transfer, "MAX_READ_S", 0.4)
    monkeypatch.setattr(kv_transfer, "DOWN_S", 0.0)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            kv_transfer.receive(connection, kv_transfer.Ask, time.monotonic() + 5)
            says(connection)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        assert reader.read(listener.getsockname()[1]).arrived == (False,) * 4
        assert time.monotonic() - began < 5.0
        thread.join()


def test_what_others_say_is_one_line_of_the_log(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            kv_transfer.receive(connection, kv_transfer.Ask, time.monotonic() + 5)
            kv_transfer.send(connection, kv_transfer.Found(error="no\nERROR all is lost " + "x" * 100_000))

    with socket.create_server((HOST, 0)) as listener, caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=serve)
        thread.start()
        assert reader.read(listener.getsockname()[1]).arrived == (False,) * 4
        reader.mover.submit(Move(2, REMOTE, DEVICE, (Record(0, KEY, 0, 1),), Peer("a\nERROR b", 1, KEY)))
        reader.moved()
        thread.join()
    lines = [record.getMessage() for record in caplog.records]
    assert "computed here: no?ERROR all is lost xx" in lines[0]
    assert "KV of a?ERROR b:1 is not used" in lines[1]
    assert all("\n" not in line and len(line) < 1000 for line in lines)


def test_a_server_that_is_down_is_not_tried_for_a_while(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    tried: list[Any] = []
    make = socket.socket
    monkeypatch.setattr(kv_transfer.socket, "socket", lambda *args: tried.append(args) or make(*args))
    with caplog.at_level(logging.WARNING):
        assert reader.read(port).arrived == (False,) * 4
        assert reader.read(port, move_id=2).arrived == (False,) * 4
    assert len(tried) == 1
    assert caplog.text.count("is computed here: [Errno 111] Connection refused") == 1


def test_a_read_that_waits_is_stopped_at_once(reader: Reader) -> None:
    with socket.create_server((HOST, 0)) as listener:
        reader.submit(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            began = time.monotonic()
            reader.mover.cancel(frozenset({1}))
            assert time.monotonic() - began < 2.0
    assert reader.moved().arrived == (False,) * 4


def test_a_name_that_is_not_resolved_holds_up_nobody(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = threading.Event(), threading.Event()

    def resolve(*args: Any, **kwargs: Any) -> list[Any]:
        asked.set()
        ended.wait(10.0)
        return []

    monkeypatch.setattr(kv_transfer.socket, "getaddrinfo", resolve)
    began = time.monotonic()
    reader.submit(1)
    assert asked.wait(5.0)
    reader.mover.cancel(frozenset({1}))
    assert reader.moved().arrived == (False,) * 4
    monkeypatch.setattr(kv_transfer, "CONNECT_TIMEOUT_S", 0.05)
    assert reader.read(2, move_id=2).arrived == (False,) * 4
    assert time.monotonic() - began < 5.0
    ended.set()


@pytest.mark.parametrize("sent", [b"", b"\xff" * 8, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_a_reader_that_is_none_leaves_what_is_kept(sent: bytes, server: TransferServer, reader: Reader) -> None:
    server.keep(kept())
    server.ready(1)
    with socket.create_connection((HOST, server.port)) as connection:
        connection.sendall(sent)
    assert reader.read(server.port).arrived == (True,) * 4


def test_a_reader_for_whom_there_is_no_thread_is_left_and_the_next_is_served(
    server: TransferServer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.keep(kept())
    server.ready(1)
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "kv-reader":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with socket.create_connection((HOST, server.port), 4.0) as connection:
            assert connection.recv(1) == b""
    assert reader.read(server.port).arrived == (True,) * 4


def test_a_length_takes_no_memory_before_its_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<Q", kv_transfer.MESSAGE_BYTES))
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(ConnectionResetError):
            kv_transfer.receive(ours, kv_transfer.Ask, time.monotonic() + 5)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 4 * kv_transfer.PIECE_BYTES


def test_a_message_is_no_longer_than_the_records_that_it_may_name_take(server: TransferServer) -> None:
    num_records = len(SIZES) * FACTS.max_model_len // FACTS.kv_block_size
    longest = kv_transfer.MESSAGE_BYTES + num_records * kv_transfer.RECORD_BYTES
    for length, is_waited_for in ((longest, True), (longest + 1, False)):
        with socket.create_connection((HOST, server.port)) as connection:
            connection.settimeout(0.1 if is_waited_for else 4.0)
            connection.sendall(struct.pack("<Q", length))
            with pytest.raises(TimeoutError) if is_waited_for else contextlib.nullcontext():
                assert connection.recv(1) == b""


def answer(built: BuiltEngine, prompt: list[int], **sampling: Any) -> tuple[list[Any], TokenDelta]:
    """What each step of a request yields, and the last delta."""
    core = built.core
    core.add_request(GenerationRequest("a", prompt, SamplingParams(ignore_eos=True, logprobs=2, **sampling)))
    deltas: list[TokenDelta] = []
    while core.has_unfinished():
        deltas += core.step().deltas
        core.collect_drafts()
        check_core(core)
    return [(delta.token_ids, delta.num_draft_tokens, delta.logprobs) for delta in deltas], deltas[-1]


@contextlib.contextmanager
def advancing(built: BuiltEngine) -> Iterator[None]:
    """Let an idle engine go on with what it keeps, as its process does."""
    ended = threading.Event()

    def advance() -> None:
        while not ended.wait(0.002):
            built.core.advance_moves()

    thread = threading.Thread(target=advance)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", [name if name == "DFlash" else by_night(name) for name in CASES])
def test_a_prefill_and_a_decode_engine_answer_what_one_does(name: str, tmp_path: Path) -> None:
    """Tokens, accepted drafts of each step and log-probabilities; and the whole prompt but its last block came."""
    settings = COMMON | {"kv_write_guard": True} | CASES[name](tmp_path / "models")
    first, second = engine(kv_role="prefill", **settings), engine(kv_role="decode", **settings)
    for prompt, (_, sampling) in zip(prompts(first), ASKED, strict=True):
        # Alone, and the second time, when it begins behind a hit too.
        _, (expected, _) = [answer(first, prompt, max_tokens=12, cache_salt="alone", **sampling) for _ in range(2)]
        asked = KVTransferParams(do_remote_decode=True)
        (([token], _, _),), last = answer(first, prompt, max_tokens=1, kv_transfer_params=asked, **sampling)
        assert token == expected[0][0][0]
        params = last.kv_transfer_params
        assert params is not None
        with advancing(first):
            steps, last = answer(second, prompt, max_tokens=12, kv_transfer_params=params, **sampling)
        assert steps == expected
        assert last.stats is not None
        size = first.ready.kv_block_size
        assert last.stats.num_loaded_tokens == {REMOTE: (len(prompt) - 1) // size * size}
    assert first.runner.mover is not None
    assert first.runner.mover.sender is not None
    for built in (first, second):
        built.core.advance_moves()
        assert not built.core.is_keeping


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_role": "prefill", "enable_prefix_caching": False}, "'kv_role' is 'prefill', and enable_prefix_caching"),
        ({"kv_role": "decode", "tensor_parallel_size": 2}, "'kv_role' is 'decode', and tensor_parallel_size is 2"),
        ({"kv_role": "prefill", "kv_transfer_host": "192.0.2.1"}, "where the server cannot listen"),
        ({"kv_role": "prefill", "kv_transfer_host": "0.0.0.0"}, "'0.0.0.0', and other servers are told to connect"),
        ({"kv_role": "sender"}, "kv_role"),
        ({"kv_role": "prefill", "kv_transfer_backend": "nixl"}, "the package nixl cannot be imported"),
    ],
)
def test_a_role_that_cannot_be_is_refused_by_a_sentence(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=message):
        LLM(**COMMON, **changes)
