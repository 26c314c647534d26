"""Requests and responses as JSON and server-sent events, and HTTP's errors as ours. Shared by both HTTP transports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx

from dflash_client.address import Location
from dflash_client.connection import Connection
from dflash_client.errors import (
    ClientError,
    ConnectionFailed,
    ConnectionLost,
    Internal,
    error_for,
    error_in_text,
    no_tls,
    not_ready,
    refused_caller,
    timed_out,
    untrusted,
)
from dflash_client.request import Request
from dflash_client.responses import Outputs

# How the resolvers of different systems word that a name has no address.
_NO_SUCH_HOST = ("name or service not known", "name resolution", "no address associated", "nodename nor servname")
# Of a server that takes a handshake for a request that it cannot read.
_HANDSHAKE_ENDED = "eof occurred in violation of protocol"
# What a server that expects TLS does to a request in the clear, among others.
_CUT_OFF = ("without sending a response", "connection reset")
_STATUS_OF_CODE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    503: "UNAVAILABLE",
}


def client_options(connection: Connection) -> dict[str, Any]:
    """The options of an httpx client.

    Each request has a connection of its own: one that was kept open may have been closed by the server just before,
    which cannot be told from a server that died while it worked. No bound on connections: how many requests run is
    the caller's business. `trust_env` is off since a proxy set for the web must not swallow calls to a server of one's
    own. In the clear no certificate is looked at, and reading the authorities takes longer than a short request.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return {
        "base_url": connection.location.http_url,
        "headers": dict(connection.headers),
        "limits": limits,
        "trust_env": False,
        "verify": False if connection.tls is None else connection.tls.ssl_context(),
    }


def model_path(model: str, verb: str) -> str:
    """The path of one of a model's endpoints."""
    return f"/v2/models/{quote(model, safe='')}/{verb}"


def transport_error(error: httpx.TransportError, location: Location) -> ClientError:
    """Our error for a connection that failed or broke."""
    address, words = location.address, str(error).lower()
    if location.secure and "certificate_verify_failed" in words:
        return untrusted(address, str(error).partition("failed: ")[2].partition(" (_ssl")[0] or str(error))
    if location.secure and "wrong_version_number" in words:
        return no_tls(address, "http://")
    if location.secure and isinstance(error, httpx.ConnectError) and _HANDSHAKE_ENDED in _reason(error).lower():
        # As Triton's HTTP server does with what is no HTTP.
        return ConnectionFailed(f"{address} ended the TLS handshake; if no TLS is spoken there, begin with http://")
    if any(known in words for known in _NO_SUCH_HOST):
        return ConnectionFailed(f"the host of {address} has no address; check its name")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ConnectionFailed(f"no HTTP server answers at {address}; is it running, and is this its HTTP port?")
    if isinstance(error, httpx.TimeoutException):
        return timed_out()
    if isinstance(error, httpx.RemoteProtocolError) and "illegal" in words:
        return ConnectionFailed(
            f"what answers at {address} does not speak HTTP; if this is the gRPC port, use grpc:// (--protocol grpc)"
        )
    reason = _reason(error)
    cut_off = not location.secure and any(known in reason.lower() for known in _CUT_OFF)
    hint = " (If it expects TLS, begin the URL with https://.)" if cut_off else ""
    return ConnectionLost(f"the connection to {address} broke: {reason}{hint}")


def _reason(error: BaseException) -> str:
    """What an error says. With asyncio it says nothing itself, and one of those that caused it does."""
    cause: BaseException | None = error
    while cause is not None:
        if text := str(cause):
            return text
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def refusal(code: int, body: bytes, location: Location) -> ClientError:
    """The error of a response that is not 200. Triton may send it as JSON or as a server-sent event; what stands in
    front of it may send anything."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        error = json.loads(text.removeprefix("data:"))["error"]
    except (ValueError, KeyError, TypeError):
        error = ""
    status = _STATUS_OF_CODE.get(code, "INTERNAL")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        error = error["message"]
        if code == 404:
            error = (
                f"{location.http_url} answers as OpenAI's API does ({error[:200]}); this client speaks Triton's: give "
                "the address of Triton's own HTTP port, 8000 by default, or of gRPC, 8001"
            )
    message = str(error)
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return refused_caller(status, location.address, message or f"HTTP status {code}")
    if message:
        # Triton 2.51 answers every error of a model with 400.
        return error_in_text(message, status)
    where = f"{location.http_url} answered with HTTP status {code}"
    return error_for(status, f"{where}: {' '.join(text.split())[:200]}" if text else where)


def readiness(response: httpx.Response, model: str, location: Location) -> ClientError | None:
    """What the readiness end point of a model says: None when it is ready."""
    if response.status_code == 200:
        return None
    error = refusal(response.status_code, response.content, location)
    # Triton answers 400, without a word, for a model that is not ready or not there.
    return not_ready(model, location.address) if response.status_code == 400 else error


def encode(request: Request) -> dict[str, Any]:
    """The JSON body of a request."""
    body: dict[str, Any] = {**request.strings(), **request.flags()}
    if request.token_ids is not None:
        body["input_ids"] = list(request.token_ids)
    return body


def decode(text: str | bytes) -> Outputs:
    """The outputs in a response's JSON. Raises the error that it holds instead, if it does."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Internal(f"the server sent something that is not a JSON object: {text[:200]!r}")
    if "error" in body:
        raise error_in_text(str(body["error"]), "INTERNAL")
    # Triton writes a tensor of one element as a bare value.
    return {name: value if isinstance(value, list) else [value] for name, value in body.items()}


class EventParser:
    """Finds the server-sent events in the chunks of a body.

    Only newlines end a line: httpx's own splitter also breaks at U+2028 and U+0085, which Triton leaves unescaped
    inside JSON. Comments and other fields are skipped; an event that the connection cut off, with no empty line after
    it, is not given out, as the standard has it.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # the line that has not ended, in pieces: it may come in thousands
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Take a chunk; the data of each event that it ends: its `data:` lines joined."""
        end, *begun = chunk.split(b"\n")
        self._line.append(end)
        for begin in begun:
            line, self._line = b"".join(self._line), [begin]
            text = line.removesuffix(b"\r").decode("utf-8", errors="replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                event, self._data = "\n".join(self._data), []
                yield event
