"""Records of KV by NIXL: a decode server reads a prefill server's memory by itself, over RDMA where there is some.

The package `nixl` is optional; what is asked and confirmed goes over the connection of `kv_transfer.py`.
"""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dflash_backend.worker.kv_mover import DeviceRecords, host_memory
from dflash_backend.worker.kv_transfer import IO_TIMEOUT_S, Memory, Part, ReadRecord, TransferError

# Between two looks at a transfer.
POLL_S = 0.0001


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
            state = self._agent.transfer(handle)
        until = time.monotonic() + IO_TIMEOUT_S
        while state == "PROC" and time.monotonic() < until and not stopped.is_set():
            time.sleep(POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"NIXL could not read it: its state is {state} after {IO_TIMEOUT_S:g} s at most")
        return buffer[: start - buffer.ctypes.data]


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
