"""Reads by NIXL that do not end: what they write later is in no other record, and they hold a bounded memory."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.worker import kv_transfer
from dflash_backend.worker.kv_transfer import NixlAgent, TransferError, TransferServer
from tests.worker.test_kv_transfer import FACTS, HOST, Reader, content, device, kept


class LateAgent:
    """An agent of NIXL whose transfers have `states`, of which exceptions are raised.

    writes: of each transfer the addresses and bytes that it writes to, by `write`, which may come late.
    """

    def __init__(self, *args: Any) -> None:
        self.states: list[Any] = []
        self.writes: list[list[tuple[int, int]]] = []
        self.registered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: b"m" if name == "get_agent_metadata" else None

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [region[0] for region in regions]

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return regions

    def initialize_xfer(self, kind: str, local: list[tuple[int, int, int]], *args: Any) -> int:
        self.writes.append([(address, size) for address, size, _ in local])
        return len(self.writes) - 1

    def transfer(self, handle: int) -> str:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        if state == "DONE":
            self.write(handle, 1)
        return str(state)

    def check_xfer_state(self, handle: int) -> str:
        return "PROC"

    def write(self, handle: int, value: int) -> None:
        """What the network card does."""
        for address, size in self.writes[handle]:
            ctypes.memset(address, value, size)


@pytest.fixture
def late_agent(monkeypatch: pytest.MonkeyPatch) -> NixlAgent:
    monkeypatch.setitem(sys.modules, "nixl._api", SimpleNamespace(nixl_agent=LateAgent, nixl_agent_config=dict))
    monkeypatch.setattr(kv_transfer, "IO_TIMEOUT_S", 0.01)
    return NixlAgent(device(3))


@pytest.mark.parametrize("state", ["PROC", "ERR", RuntimeError("NIXL_ERR_BACKEND")])
def test_what_a_read_writes_after_it_was_given_up_is_in_no_other_record(late_agent: NixlAgent, state: Any) -> None:
    agent = late_agent._agent
    agent.states = [state, "DONE", "DONE"]
    asked = ("peer", "DRAM", 0, [(0, 16), (64, 8)], threading.Event())
    with pytest.raises((TransferError, RuntimeError)):
        late_agent.read(*asked)
    data = late_agent.read(*asked)
    agent.write(0, 9)
    assert data.tobytes() == b"\1" * 24
    assert late_agent.read(*asked).ctypes.data == data.ctypes.data, "a whole read leaves its buffer to the next"
    assert agent.writes[0][0][0] in agent.registered


def test_reads_that_do_not_end_hold_a_bounded_number_of_buffers(
    late_agent: NixlAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then records come over TCP."""
    monkeypatch.setattr(kv_transfer, "MAX_ABANDONED", 2)
    late_agent._agent.states = ["ERR"] * 2
    keeper = device(1)
    server, reader = TransferServer(keeper, FACTS, (HOST, 0), NixlAgent(keeper)), Reader(FACTS, late_agent)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            assert late_agent.is_broken == (number == 3)
            server.keep(kept(number))
            server.ready(number)
            assert reader.read(server.port, move_id=number).arrived == (number == 3,) * 4
            server.withdraw(number)
    assert caplog.text.count("2 reads by NIXL did not end") == 1
    assert content(reader.device, 0, 1) == content(keeper, 0, 6)
    reader.mover.close()
    server.close()
