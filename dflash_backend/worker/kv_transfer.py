"""Records of KV between two servers: what is kept here is read by others, and what others keep is read here.

Over TCP, a connection for each prompt (`docs/disaggregation.md`): the reader says what it is and asks for records by
their hashes; the keeper says which it has, and either sends them or says where in its memory they lie: with NIXL, an
optional package, the reader reads them there by itself, over RDMA where there is some. In the end the reader says that
it has them, and the keeper whether it has kept them all the while. Only then are they used.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import select
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from dflash_backend.core.moves import Kept, Move, Peer, Record
from dflash_backend.listening import listening_socket
from dflash_backend.worker.kv_mover import DeviceRecords, RecordStore, host_memory

_log = logging.getLogger(__name__)

# Seconds without a byte after which the other side counts as gone, and to connect.
IO_TIMEOUT_S, CONNECT_TIMEOUT_S = 5.0, 2.0
# And seconds for all records of a prompt.
MAX_READ_S = 60.0
# And between two looks at what another server reads by itself.
HELP_S = 0.0001
# A server that was not to be reached is not tried again for as long: requests that name it compute meanwhile.
DOWN_S = 5.0
# Readers at a time, and how many servers this one reads from at a time.
MAX_READERS, NUM_READING = 64, 4
_LOOPBACK = re.compile(r"127(?:\.\d{1,3}){3}", re.ASCII)
# Of a message, and more for each record that it may name; memory for as much of it as has come, and for this more.
MESSAGE_BYTES, RECORD_BYTES, PIECE_BYTES = 1 << 20, 64, 64 << 10
# Buffers of reads by NIXL that did not end.
MAX_ABANDONED = 32
# A line in the log for each kind of trouble, this often at most.
LOG_EVERY_S = 60.0
MAX_LOGGED_CHARS = 600
_LENGTH = struct.Struct("<Q")


class TransferError(Exception):
    """KV did not come; the message says why."""


class Facts(msgspec.Struct, frozen=True):
    """What two servers must have in common: the fingerprint, 32 bytes of models, code and settings. The others are in
    it, or of no importance where it is the same, and say what differs. max_model_len bounds what a reader asks for.
    rope_length: the length of dynamic rotary frequencies, 0 without."""

    fingerprint: bytes
    kv_block_size: int
    max_model_len: int
    target: str
    drafter: str
    code: str = ""
    rope_length: int = 0

    def difference(self, other: Facts) -> str | None:
        """What differs in `other`, as a sentence; None: nothing."""
        if self.fingerprint == other.fingerprint:
            return None
        names = {
            "kv_block_size": "kv_block_size",
            "rope_length": "the length of dynamic rope (max_model_len)",
            "code": "the version of the code",
            "target": "target",
            "drafter": "drafter",
        }
        for name, said in names.items():
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{said} is {here!r} on the server that keeps the KV, and {there!r} on the one that asks for it"
        return "weights, dtypes or devices of the two servers differ"


class Ask(msgspec.Struct, frozen=True):
    """Records of what is kept under `key`, by group and hash; none where nothing of it is needed. transport: how they
    are to come."""

    facts: Facts
    key: bytes
    records: list[tuple[int, bytes]]
    transport: str


class Found(msgspec.Struct, frozen=True):
    """The slots of the records, -1 of those that are not there; or why there are none. memory: where slots lie."""

    slots: list[int] = []
    error: str = ""
    memory: Memory | None = None


class Part(msgspec.Struct, frozen=True):
    """A tensor of records, uint8 `[layers, slots, num_bytes]`: the address of slot 0 of layer 0, and bytes from one
    layer and from one slot to the next."""

    address: int
    num_layers: int
    layer_stride: int
    slot_stride: int
    num_bytes: int


class Memory(msgspec.Struct, frozen=True):
    """What NIXL needs to read a server's records: its agent's metadata, the parts of each group, and what kind of
    memory they are in."""

    metadata: bytes
    groups: list[list[Part]]
    kind: str
    device: int


class HasRead(msgspec.Struct, frozen=True):
    """The reader has all that it wants."""


class WasKept(msgspec.Struct, frozen=True):
    """Whether it was kept until then."""

    is_kept: bool


Message = TypeVar("Message", Ask, Found, HasRead, WasKept)


class RegisteredMemory(Protocol):
    """The device's records where another server's transport reads them by itself."""

    memory: Memory

    def progress(self) -> None:
        """Do this side's part of what others read now, where the network needs one."""


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises `OSError`."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, kind: type[Message], until: float, num_records: int = 0) -> Message:
    """The next message. until: as of `receive_into`. num_records: that it may name. Raises `OSError`, or
    `TransferError` for anything else than one of this kind."""
    header = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(header), until)
    (length,) = _LENGTH.unpack(header)
    if length > MESSAGE_BYTES + num_records * RECORD_BYTES:
        raise TransferError(f"a message of {length} bytes came, which is no {kind.__name__}")
    data = bytearray()
    while len(data) < length:
        piece = bytearray(min(PIECE_BYTES, length - len(data)))
        receive_into(connection, memoryview(piece), until)
        data += piece
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"what came is no {kind.__name__}: {error}") from None


def receive_into(connection: socket.socket, part: memoryview, until: float) -> None:
    """Fill `part` until a time (monotonic, s), however little comes at a time. Raises `OSError`."""
    while len(part):
        if time.monotonic() > until:
            raise TimeoutError("it came too slowly")
        count = connection.recv_into(part)
        if not count:
            raise ConnectionResetError("the connection was closed")
        part = part[count:]


@dataclass
class _Kept:
    """What is kept, what its copies come after, and whether it can be read, and is."""

    kept: Kept
    after: torch.cuda.Event | None = None
    is_ready: bool = False
    is_read: bool = False


class TransferServer:
    """A `core.moves.KVSender`: a thread that takes connections, and one for each reader."""

    def __init__(
        self,
        device: DeviceRecords,
        facts: Facts,
        address: tuple[str, int],
        registered: RegisteredMemory | None = None,
    ) -> None:
        """address: where to listen, which is what others are told; port 0: any. registered: for NIXL. Raises
        `OSError`."""
        self._device, self._facts, self._registered = device, facts, registered
        self.engine_id = str(uuid.uuid4())
        self._listener = listening_socket(*address, MAX_READERS)
        self.host, self.port = address[0], self._listener.getsockname()[1]
        # Guards all below; readers that wait are told of changes.
        self._changed = threading.Condition()
        self._kept: dict[int, _Kept] = {}
        self._taken: list[int] = []
        self._readers: set[socket.socket] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="kv-transfer", daemon=True)
        self._thread.start()

    def keep(self, kept: Kept) -> None:
        """As `core.moves.KVSender.keep`."""
        with self._changed:
            self._kept[kept.number] = _Kept(kept)

    def ready(self, number: int) -> None:
        """As `core.moves.KVSender.ready`."""
        after = self._device.after()
        with self._changed:
            if (one := self._kept.get(number)) is not None:
                one.after, one.is_ready = after, True
                self._changed.notify_all()

    def withdraw(self, number: int) -> None:
        """As `core.moves.KVSender.withdraw`."""
        with self._changed:
            self._kept.pop(number, None)
            self._changed.notify_all()

    def taken(self) -> list[int]:
        """As `core.moves.KVSender.taken`."""
        if not self._taken:
            return []
        with self._changed:
            taken, self._taken = self._taken, []
        return taken

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            for reader in self._readers:
                with contextlib.suppress(OSError):
                    reader.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("kv_transfer_port: a connection could not be taken: %s", error)
                time.sleep(0.1)  # such as too many open files
                continue
            with self._changed:
                if self._closing or len(self._readers) >= MAX_READERS:
                    connection.close()
                    continue
                self._readers.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kv-reader", daemon=True).start()
            except RuntimeError as error:  # too many threads; the reader computes
                _log.warning("kv_transfer_port: a connection could not be taken: %s", error)
                with self._changed, connection:
                    self._readers.discard(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(IO_TIMEOUT_S)
                self._answer(connection)
        except (OSError, TransferError) as error:
            _log.info("a reader of KV is gone: %s", error)
        except Exception:  # noqa: BLE001 - one reader's trouble is not another's
            _log.exception("KV could not be sent")
        finally:
            with self._changed:
                self._readers.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        most = len(self._device.sizes) * (self._facts.max_model_len // self._facts.kv_block_size)
        ask = receive(connection, Ask, time.monotonic() + IO_TIMEOUT_S, most)
        if (difference := self._facts.difference(ask.facts)) is not None:
            send(connection, Found(error=difference))
            return
        if (one := self._take(ask.key)) is None:
            send(connection, Found(error="it is not kept (any more)"))
            return
        try:
            slots = {(record.group, record.block_hash): record.source for record in one.kept.records}
            found = [(group, block_hash, slots.get((group, block_hash), -1)) for group, block_hash in ask.records]
            memory = self._registered.memory if self._registered is not None and ask.transport == "nixl" else None
            send(connection, Found([slot for _, _, slot in found], memory=memory))
            if memory is None:
                self._send_records(connection, one, [Record(g, h, slot, 0) for g, h, slot in found if slot >= 0])
            until = time.monotonic() + MAX_READ_S
            if self._registered is not None and memory is not None:
                # What the other side reads goes on until it says something, or is gone.
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                while not poll.poll(0) and time.monotonic() < until:
                    self._registered.progress()
                    time.sleep(HELP_S)
            receive(connection, HasRead, until)
            with self._changed:
                is_kept = self._kept.pop(one.kept.number, None) is not None
                if is_kept:
                    self._taken.append(one.kept.number)
            send(connection, WasKept(is_kept))
        finally:
            one.is_read = False

    def _take(self, key: bytes) -> _Kept | None:
        """What is kept under a name, once it can be read, rather one that is not read yet; None: there is none."""

        def named() -> list[_Kept]:
            return [one for one in self._kept.values() if one.kept.key == key]

        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or not (found := named()) or any(one.is_ready for one in found), IO_TIMEOUT_S / 2
            )
            ready = sorted((one for one in named() if one.is_ready), key=lambda one: one.is_read)
            if not ready:
                return None
            ready[0].is_read = True
            return ready[0]

    def _send_records(self, connection: socket.socket, one: _Kept, records: Sequence[Record]) -> None:
        scratch = host_memory(max(self._device.sizes), pinned=self._device.device.type == "cuda")
        self._device.wait_for(one.after)
        until = time.monotonic() + MAX_READ_S
        for record in records:
            if until < time.monotonic():
                raise TimeoutError("it reads too slowly")
            data = self._device.read(record, scratch[: self._device.sizes[record.group]])
            with self._changed:
                if one.kept.number not in self._kept:
                    data[:] = 0  # it may be another request's by now; the reader is told in the end
            connection.sendall(data.data)


class RemoteRecords(RecordStore):
    """What other servers keep, a connection for each move."""

    num_threads = NUM_READING
    bounds_reads = True

    def __init__(
        self,
        facts: Facts,
        sizes: Sequence[int],
        transport: Transport | None = None,
        peers: frozenset[str] = frozenset(),
    ) -> None:
        """sizes: bytes of a record of each group. transport: other than the connection itself. peers: the only servers
        to connect to, as host, or host and port with a colon; empty: those on this machine; `*`: any."""
        self._facts, self._sizes, self._transport = facts, list(sizes), transport
        self._peers = peers
        self._lock = threading.Lock()
        self._down_until: dict[tuple[str, int], float] = {}
        self._logged: dict[str, float] = {}

    def opened(self, move: Move) -> RecordStore:
        """The move's records, from the server that keeps them; none where it does not give them."""
        assert move.peer is not None
        return _Session(self, move, move.peer)

    def trusts(self, peer: Peer) -> bool:
        """Whether KV of a server is to be used: other requests get it too."""
        if not self._peers:
            return peer.host in ("localhost", "::1") or _LOOPBACK.fullmatch(peer.host) is not None
        return not self._peers.isdisjoint(("*", peer.host, f"{peer.host}:{peer.port}"))

    def _is_down(self, peer: Peer) -> bool:
        with self._lock:
            return self._down_until.get(peer[:2], 0.0) > time.monotonic()

    def _note(self, peer: Peer, why: str, is_down: bool) -> None:
        """A line for the first trouble of a kind, once a minute."""
        now, why = time.monotonic(), _one_line(why)
        with self._lock:
            if is_down:
                self._down_until[peer[:2]] = now + DOWN_S
                self._down_until = {each: until for each, until in self._down_until.items() if until > now}
            if now - self._logged.get(why, -LOG_EVERY_S) < LOG_EVERY_S:
                return
            self._logged = {each: at for each, at in self._logged.items() if now - at < LOG_EVERY_S}
            self._logged[why] = now
        _log.warning("KV of %s:%d is not used, and is computed here: %s", _one_line(peer.host), peer.port, why)


def _one_line(text: str) -> str:
    """What another server or a client says, as it is logged."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_LOGGED_CHARS])


class Transport(Protocol):
    """Another way than the connection for records to come."""

    name: str

    @property
    def is_broken(self) -> bool:
        """Whether it reads no more, and records are to come by the connection."""

    def reader(self, memory: Memory, stopped: threading.Event) -> ReadRecord:
        """Reads from a server's memory, until `stopped` is set. Raises `TransferError`."""


ReadRecord = Callable[[int, int, int], np.ndarray]
"""Reads a record of one server: its group, slot and size -> uint8 `[size]`. Raises `TransferError`."""


class _Session(RecordStore):
    """One move: asks, reads in the order of the records, and has it confirmed."""

    def __init__(self, owner: RemoteRecords, move: Move, peer: Peer) -> None:
        self._owner, self._move, self._peer = owner, move, peer
        self._connection: socket.socket | None = None
        self._has_begun = False
        self._stopped, self._woken = threading.Event(), threading.Event()  # the latter also once it is resolved
        self._slots: deque[int] = deque()
        self._read: ReadRecord | None = None
        self._until = time.monotonic() + MAX_READ_S

    def _begin(self) -> None:
        """Connect and ask."""
        self._has_begun = True
        owner, peer = self._owner, self._peer
        if not owner.trusts(peer):
            owner._note(peer, "it is not among kv_transfer_peers", is_down=False)
            return
        if owner._is_down(peer):
            return
        records = [(record.group, record.block_hash) for record in self._move.records]
        transport = owner._transport
        if transport is not None and transport.is_broken:
            transport = None
        try:
            family, kind, protocol, address = self._resolved()
            # Before it connects, so that `interrupt` ends that too.
            self._connection = connection = socket.socket(family, kind, protocol)
            if self._stopped.is_set():
                raise TransferError("it was stopped")
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(address)
            connection.settimeout(IO_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send(connection, Ask(owner._facts, peer.key, records, "tcp" if transport is None else transport.name))
            found = receive(connection, Found, self._until, len(records))
            if found.error:
                raise TransferError(found.error)
            if len(found.slots) != len(records):
                raise TransferError(f"{len(found.slots)} places came for {len(records)} records")
            if found.memory is not None and transport is not None:
                self._read = transport.reader(found.memory, self._stopped)
            self._slots.extend(found.slots)
        except (OSError, TransferError, ValueError) as error:
            self._fail(error)

    def _resolved(self) -> tuple[int, int, int, Any]:
        """Its family, kind, protocol and address, looked up on a thread of its own, which nothing but the resolver
        ends. Raises as `socket.getaddrinfo`, or `TransferError` where it is stopped."""
        found: list[tuple[int, int, int, Any] | Exception] = []

        def look_up() -> None:
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(*self._peer[:2], type=socket.SOCK_STREAM)[0]
                found.append((family, kind, protocol, address))
            except Exception as error:  # noqa: BLE001 - who waits raises it
                found.append(error)
            self._woken.set()

        threading.Thread(target=look_up, name="kv-address", daemon=True).start()
        self._woken.wait(CONNECT_TIMEOUT_S)
        if self._stopped.is_set():
            raise TransferError("it was stopped")
        if not found:
            raise TimeoutError("its name was not resolved in time")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def read(self, record: Record, into: np.ndarray) -> np.ndarray | None:
        if not self._has_begun:
            self._begin()
        if self._connection is None or not self._slots:
            return None
        slot = self._slots.popleft()
        if slot < 0:
            return None
        try:
            if self._read is not None:
                return self._read(record.group, slot, len(into))
            receive_into(self._connection, into.data, self._until)
        except (OSError, TransferError) as error:
            self._fail(error)
            return None
        return into

    def ended(self, is_whole: bool) -> bool:
        if is_whole and not self._has_begun:
            self._begin()
        connection, is_kept = self._connection, False
        if connection is None:
            return False
        if is_whole:
            try:
                send(connection, HasRead())
                is_kept = receive(connection, WasKept, self._until).is_kept
                if not is_kept:
                    self._owner._note(self._peer, "it was given up while it was read", is_down=False)
            except (OSError, TransferError) as error:
                self._fail(error)
        connection.close()
        self._connection = None
        return is_kept

    def interrupt(self) -> None:
        self._stopped.set()
        self._woken.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _fail(self, error: Exception) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._stopped.is_set():
            self._owner._note(self._peer, f"{error}" or type(error).__name__, is_down=isinstance(error, OSError))


class NixlUnavailable(Exception):
    """NIXL cannot be used; the message says why."""


class NixlAgent:
    """This process's agent: the device's records, registered for others to read, and buffers to read theirs into."""

    name = "nixl"

    def __init__(self, device: DeviceRecords) -> None:
        """Raises `NixlUnavailable`."""
        try:
            nixl = importlib.import_module("nixl._api")
        except ImportError as error:
            raise NixlUnavailable(
                f"the package nixl cannot be imported ({error}); install it with `pip install --no-deps nixl nixl-cu12`"
            ) from None
        self._device = device
        # Agents are not for several threads at a time.
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._abandoned: list[np.ndarray] = []
        self._peers: dict[bytes, str] = {}
        try:
            # Its own thread of progress would take a core, also while nothing moves.
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl.nixl_agent(f"dflash-{uuid.uuid4()}", config)
            kind = "VRAM" if device.device.type == "cuda" else "DRAM"
            number = device.device.index or 0
            regions = [(part.data_ptr(), part.numel(), number, "") for parts in device.parts for part in parts]
            self._agent.register_memory(regions, kind)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # noqa: BLE001 - NIXL raises errors of its own kinds
            raise NixlUnavailable(f"NIXL did not start: {error}") from None
        groups = [
            [
                Part(part[:, first:].data_ptr(), part.shape[0], part.stride(0), part.stride(1), part.shape[2])
                for part in parts
            ]
            for parts, first in zip(device.parts, device.first, strict=True)
        ]
        self.memory = Memory(metadata, groups, kind, number)
        """Of this device's records, for others."""

    def reader(self, memory: Memory, stopped: threading.Event) -> ReadRecord:
        """As `kv_transfer.Transport.reader`."""
        with self._lock:
            if memory.metadata not in self._peers:
                try:
                    self._peers[memory.metadata] = self._agent.add_remote_agent(memory.metadata)
                except Exception as error:  # noqa: BLE001 - as above
                    raise TransferError(f"NIXL does not reach it: {error}") from None
        return partial(read_record, self, memory, self._peers[memory.metadata], stopped)

    def progress(self) -> None:
        """As `kv_transfer.RegisteredMemory.progress`."""
        with self._lock:
            self._agent.get_new_notifs()

    def buffer(self) -> np.ndarray:
        """The calling thread's, uint8, for the largest record."""
        buffer: np.ndarray | None = getattr(self._buffers, "array", None)
        if buffer is None:
            buffer = host_memory(max(self._device.sizes), pinned=self._device.device.type == "cuda")
            with self._lock:
                self._agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
            self._buffers.array = buffer
        return buffer

    def read(
        self, peer: str, kind: str, device: int, remote: Sequence[tuple[int, int]], stopped: threading.Event
    ) -> np.ndarray:
        """Memory of a peer, as addresses and bytes, one after the other, until `stopped` is set. Raises
        `TransferError`."""
        buffer = self.buffer()
        start, local, theirs = buffer.ctypes.data, [], []
        for address, size in remote:
            local.append((start, size, 0))
            theirs.append((address, size, device))
            start += size
        with self._lock:
            descriptors = self._agent.get_xfer_descs(local, "DRAM"), self._agent.get_xfer_descs(theirs, kind)
            handle = self._agent.initialize_xfer("READ", *descriptors, peer, b"")
        state = ""
        try:
            state = self._wait(handle, stopped)
        finally:
            if state != "DONE":
                self._abandon(buffer)
            with self._lock:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"NIXL could not read it: its state is {state} after {IO_TIMEOUT_S:g} s at most")
        return buffer[: start - buffer.ctypes.data]

    def _wait(self, handle: Any, stopped: threading.Event) -> str:
        """Begin a transfer and wait for its end; its last state."""
        with self._lock:
            state: str = self._agent.transfer(handle)
        until = time.monotonic() + IO_TIMEOUT_S
        while state == "PROC" and time.monotonic() < until and not stopped.is_set():
            time.sleep(HELP_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        return state

    def _abandon(self, buffer: np.ndarray) -> None:
        """Use the calling thread's buffer no more: a transfer that did not end may still write to it. It stays
        registered, and the next read gets another one."""
        self._buffers.array = None
        with self._lock:
            self._abandoned.append(buffer)
            is_last = len(self._abandoned) == MAX_ABANDONED
        if is_last:
            _log.warning(
                "kv_transfer_backend: %d reads by NIXL did not end, and each holds its buffer for good: KV comes over "
                "TCP from now on; restart the server to use NIXL again, and look at the network if this comes back",
                MAX_ABANDONED,
            )

    @property
    def is_broken(self) -> bool:
        """As `kv_transfer.Transport.is_broken`."""
        return len(self._abandoned) >= MAX_ABANDONED


def read_record(
    agent: NixlAgent, memory: Memory, peer: str, stopped: threading.Event, group: int, slot: int, size: int
) -> np.ndarray:
    """As `kv_transfer.ReadRecord`, from `memory` of a peer."""
    theirs = memory.groups[group] if group < len(memory.groups) else []
    is_whole = all(part.num_layers > 0 and part.num_bytes > 0 for part in theirs)
    if not is_whole or sum(part.num_layers * part.num_bytes for part in theirs) != size:
        raise TransferError("its records have another length")
    parts = [
        (part.address + layer * part.layer_stride + slot * part.slot_stride, part.num_bytes)
        for part in theirs
        for layer in range(part.num_layers)
    ]
    try:
        return agent.read(peer, memory.kind, memory.device, parts, stopped)
    except TransferError:
        raise
    except Exception as error:  # noqa: BLE001 - NIXL raises errors of its own kinds
        raise TransferError(f"NIXL could not read it: {error}") from None
