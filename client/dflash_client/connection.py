"""How a client connects: where the server is, what is sent along with every request, and whom to trust."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import httpx

from dflash_client.address import Location

CONNECT_TIMEOUT_S = 5.0
# The longest time-out, some 31 years, and what no time-out is for the libraries below, not all of which take infinity.
LONGEST_TIMEOUT_S = 1e9
File = str | PathLike[str]
# What HTTP and gRPC both take. gRPC keeps names that begin with "grpc-" for itself, and those that end in "-bin" carry
# bytes there.
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to trust and who we are, as paths of PEM files. Without `ca_cert` the usual authorities are trusted;
    `client_cert` and `client_key` go to a server that asks who is calling."""

    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None

    def ssl_context(self) -> ssl.SSLContext:
        """The same for Python's `ssl`. Raises `ValueError` for files that are not there or hold no certificates."""
        context = httpx.create_ssl_context(trust_env=False)
        if self.ca_cert is not None:
            _check_readable("ca_cert", self.ca_cert)
            try:
                context = ssl.create_default_context(cafile=self.ca_cert)
            except ssl.SSLError as error:
                raise ValueError(f"ca_cert: {self.ca_cert} holds no certificates in PEM ({_reason(error)})") from None
        if self.client_cert is not None and self.client_key is not None:
            _check_readable("client_cert", self.client_cert)
            _check_readable("client_key", self.client_key)
            try:
                context.load_cert_chain(self.client_cert, self.client_key)
            except ssl.SSLError as error:
                raise ValueError(
                    f"client_cert {self.client_cert} and client_key {self.client_key} are not a certificate and its "
                    f"key in PEM ({_reason(error)})"
                ) from None
        return context


@dataclass(frozen=True, slots=True)
class Connection:
    """Everything that a transport needs to know. `tls` is None in the clear; names of `headers` are in lower case."""

    location: Location
    headers: tuple[tuple[str, str], ...] = ()
    tls: Tls | None = None

    @classmethod
    def build(
        cls,
        location: Location,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        ca_cert: File | None = None,
        client_cert: File | None = None,
        client_key: File | None = None,
    ) -> Connection:
        """Check what the caller passed. Raises `ValueError` with what is allowed."""
        sent = dict(check_headers(headers or {}))
        if api_key is not None:
            if "authorization" in sent:
                raise ValueError("give either api_key or the header 'authorization': both say who is calling")
            sent["authorization"] = f"Bearer {api_key}"
        check_headers(sent)
        tls = Tls(*(None if file is None else fspath(file) for file in (ca_cert, client_cert, client_key)))
        if location.secure:
            if (tls.client_cert is None) != (tls.client_key is None):
                raise ValueError("client_cert and client_key go together; give both or none")
            tls.ssl_context()
        elif tls != Tls():
            scheme = "grpcs" if location.protocol == "grpc" else "https"
            raise ValueError(f"certificates are for TLS, and this URL is in the clear; begin it with {scheme}://")
        return cls(location, tuple(sent.items()), tls if location.secure else None)


def check_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The headers with names in lower case. Raises `ValueError` for those that cannot be sent."""
    checked = tuple((name.lower(), value) for name, value in headers.items())
    for name, value in checked:
        if not _NAME.fullmatch(name) or name.startswith("grpc-") or name.endswith("-bin"):
            raise ValueError(
                f"a header named {name!r} cannot be sent; allowed: letters, digits and '-', as in 'x-team'"
            )
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            # Not the value itself: it may be a key.
            raise ValueError(f"the value of the header {name!r} cannot be sent; allowed: printable ASCII in one line")
    return checked


def check_timeout(timeout_s: float | None) -> float:
    """The seconds that a request may take; None is no bound. Raises `ValueError` for what is no time."""
    if timeout_s is None:
        return LONGEST_TIMEOUT_S
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(
            f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0 and at most {LONGEST_TIMEOUT_S:.0e}, or None "
            "for no bound"
        )
    return timeout_s


def remaining_s(deadline: float) -> float:
    """What is left until `deadline`, in the clock of `time.monotonic()`. Never 0, which no library takes."""
    return max(deadline - time.monotonic(), 0.001)


def _check_readable(argument: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{argument}: {path} cannot be read: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
