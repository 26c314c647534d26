"""Addresses of servers as people write them. Used by both clients."""

from __future__ import annotations

from typing import Literal

ProtocolName = Literal["grpc", "http"]
DEFAULT_PORTS: dict[str, int] = {"grpc": 8001, "http": 8000}


def parse_url(url: str, protocol: str) -> tuple[str, str]:
    """The protocol and `host:port` of a URL. Raises `ValueError` with what is allowed."""
    scheme, separator, rest = url.partition("://")
    if separator:
        if scheme not in DEFAULT_PORTS:
            raise ValueError(f"the URL {url!r} begins with '{scheme}://'; allowed: grpc:// or http://, or no scheme")
        protocol, url = scheme, rest
    if protocol not in DEFAULT_PORTS:
        raise ValueError(f"unknown protocol {protocol!r}; allowed: grpc or http")
    host, port = _split_port(url.rstrip("/"))
    if not host or any(c in host for c in "/?# @"):
        raise ValueError(f"{url!r} is not an address; give HOST:PORT")
    if port is None:
        return protocol, f"{host}:{DEFAULT_PORTS[protocol]}"
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the port {port!r} in {url!r} is not a number from 1 to 65535")
    return protocol, f"{host}:{int(port)}"


def _split_port(address: str) -> tuple[str, str | None]:
    """Host and port; an IPv6 host is in brackets, as in `[::1]:8001`."""
    end = address.rfind("]")
    host, separator, port = address[end + 1 :].rpartition(":")
    if not separator:
        return address, None
    return address[: end + 1] + host, port
