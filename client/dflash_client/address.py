"""Addresses of servers as people write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProtocolName = Literal["grpc", "http"]
# By scheme: the protocol, whether it is over TLS, and the port where the URL has none. In the clear that is Triton's
# own port, with TLS that of a proxy in front of it.
SCHEMES: dict[str, tuple[ProtocolName, bool, int]] = {
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 443),
    "http": ("http", False, 8000),
    "https": ("http", True, 443),
}
PROTOCOLS = ("grpc", "http")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a server is. `address` is `host:port`; `path` is what comes before `/v2/models/...` over HTTP: empty, or
    `/prefix` where a proxy puts the server below a path."""

    protocol: ProtocolName
    address: str
    secure: bool = False
    path: str = ""

    @property
    def http_url(self) -> str:
        """The base URL for HTTP."""
        return f"{'https' if self.secure else 'http'}://{self.address}{self.path}"


def parse_url(url: str, protocol: str) -> Location:
    """What a URL says. Without a scheme it is of `protocol`; only an HTTP one may have a path. Raises `ValueError` with
    what is allowed."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}; allowed: grpc or http")
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = protocol, url
    if scheme not in SCHEMES:
        raise ValueError(
            f"the URL {url!r} begins with '{scheme}://'; allowed: grpc://, grpcs://, http:// or https://, or no scheme"
        )
    name, secure, default_port = SCHEMES[scheme]
    authority, _, path = rest.partition("/")
    host, port = _split_port(authority)
    if not host or any(c in authority for c in "?# @") or any(c in path for c in "?# "):
        raise ValueError(f"{url!r} is not an address; give HOST:PORT, or a URL such as https://HOST/PATH")
    if port is not None and (not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536):
        raise ValueError(f"the port {port!r} in {url!r} is not a number from 1 to 65535")
    address = f"{host}:{default_port if port is None else int(port)}"
    return Location(name, address, secure, _path(url, path, name))


def _path(url: str, path: str, protocol: str) -> str:
    """The prefix before `/v2/models/...`; a `/v2` that was copied from there is dropped."""
    parts = [part for part in path.split("/") if part]
    if parts and protocol == "grpc":
        raise ValueError(
            f"{url!r} has a path, which gRPC has none of; give HOST:PORT, or begin with http:// or https://"
        )
    if parts[-1:] == ["v2"]:
        parts.pop()
    return "".join(f"/{part}" for part in parts)


def _split_port(address: str) -> tuple[str, str | None]:
    """Host and port; an IPv6 host is in brackets, as in `[::1]:8001`."""
    end = address.rfind("]")
    host, separator, port = address[end + 1 :].rpartition(":")
    if not separator:
        return address, None
    return address[: end + 1] + host, port
