"""Whether this machine has IPv6."""

from __future__ import annotations

import socket

import pytest


def needs_ipv6() -> None:
    """Skip a test where the loopback has no IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("the loopback has no IPv6 address")
