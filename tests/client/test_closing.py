"""A client that is closed while gRPC still waits for a call."""

from __future__ import annotations

import threading
import time

import pytest

from dflash_client import DFlashClient, grpc_transport


def test_a_channel_that_does_not_close_is_left(monkeypatch: pytest.MonkeyPatch, unused_address: str) -> None:
    """As one does not whose call Ctrl-C interrupted between its start and the thread that reads its events."""
    monkeypatch.setattr(grpc_transport, "CLOSE_S", 0.2)
    client = DFlashClient(unused_address)
    channel = client._transport._channel  # type: ignore[attr-defined]
    never, close = threading.Event(), channel.close
    monkeypatch.setattr(channel, "close", never.wait)
    started = time.monotonic()
    client.close()
    assert 0.2 <= time.monotonic() - started < 5
    never.set()
    close()


def test_a_channel_is_closed_when_its_client_is(unused_address: str) -> None:
    client = DFlashClient(unused_address)
    channel = client._transport._channel  # type: ignore[attr-defined]
    client.close()
    with pytest.raises(ValueError, match="closed"):
        channel.unary_unary("/any/call")(b"", timeout=1)
