"""`DFlashClient`: the client that programs, the command line and the benchmarks use."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

from dflash_client.grpc_transport import GrpcTransport
from dflash_client.http_transport import HttpTransport
from dflash_client.request import Request
from dflash_client.results import Delta, GenerationResult

Protocols = Literal["grpc", "http"]
DEFAULT_PORTS: dict[str, int] = {"grpc": 8001, "http": 8000}


class Transport(Protocol):
    """How requests travel. Closing the iterator that `send` returns cancels the request at the server."""

    def send(self, request: Request, deadline: float) -> Generator[Delta, None, None]:
        """Send and yield what comes back until `deadline` (`time.monotonic()`); raises `ClientError`."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class DFlashClient:
    """A synchronous client of one model. Safe to share between threads; a context manager.

    `url` is `host:port`, or `grpc://host:port` or `http://host:port`, which also chooses the protocol; without a
    port it is Triton's usual one. `timeout_s` bounds each request as a whole, connecting included.
    """

    def __init__(
        self,
        url: str = "localhost",
        protocol: Protocols = "grpc",
        model: str = "dflash",
        timeout_s: float = 300.0,
    ) -> None:
        self.protocol, self.address = parse_url(url, protocol)
        self.model = model
        self.timeout_s = timeout_s
        self._transport: Transport = (
            GrpcTransport(self.address) if self.protocol == "grpc" else HttpTransport(self.address)
        )

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Complete a prompt (text or token ids) or answer chat messages, and wait for the end.

        `sampling` takes the names of the serving contract (`max_tokens=64, temperature=0, stop=["."]`); those that
        are None are not sent. Raises `ClientError`.
        """
        request = Request.build(self.model, False, prompt, messages, sampling)
        return GenerationResult.from_deltas(self._transport.send(request, self._deadline()))

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generator[Delta, None, None]:
        """As `generate`, but yields what is new as it comes.

        Closing the generator, or leaving it to be collected, cancels the request. Raises `ClientError`, also after
        some deltas.
        """
        request = Request.build(self.model, True, prompt, messages, sampling)
        return self._transport.send(request, self._deadline())

    def close(self) -> None:
        """Close the connection; requests that still run are cancelled."""
        self._transport.close()

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def __enter__(self) -> DFlashClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
