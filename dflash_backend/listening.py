"""A socket that listens, by IPv4 or IPv6 as its address asks for."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A TCP socket that listens at this address alone; port 0: any. host: an address or a name, without brackets.
    Raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family, backlog=backlog)
