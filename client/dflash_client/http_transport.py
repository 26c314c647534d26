"""Requests over HTTP: Triton's `generate` and `generate_stream` (server-sent events) on httpx."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any
from urllib.parse import quote

import httpx

from dflash_client.errors import ClientError, ConnectionFailed, Internal, RequestTimeout, error_for
from dflash_client.request import Request
from dflash_client.results import Delta

CONNECT_TIMEOUT_S = 5.0
_STATUS_OF_CODE = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "UNAVAILABLE",
    499: "CANCELLED",
    503: "UNAVAILABLE",
}


class HttpTransport:
    """An HTTP connection pool to `address`. Connects with the first request."""

    def __init__(self, address: str) -> None:
        self._address = address
        # No bound on connections: each running request holds one, and how many run is the caller's business.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # trust_env off: a proxy set for the web must not swallow calls to a server of one's own.
        self._client = httpx.Client(base_url=f"http://{address}", limits=limits, trust_env=False)

    def send(self, request: Request, deadline: float) -> Generator[Delta, None, None]:
        """See `Transport.send`."""
        endpoint = "generate_stream" if request.stream else "generate"
        path = f"/v2/models/{quote(request.model, safe='')}/{endpoint}"
        remaining = max(deadline - time.monotonic(), 0.001)
        timeout = httpx.Timeout(remaining, connect=min(CONNECT_TIMEOUT_S, remaining))
        try:
            with self._client.stream("POST", path, json=encode(request), timeout=timeout) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                yield from self._deltas(request, response, deadline)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectionFailed(
                f"no HTTP server answers at {self._address}; is it running, and is this its HTTP port?"
            ) from error
        except httpx.TimeoutException as error:
            raise _timed_out() from error
        except httpx.TransportError as error:
            raise ConnectionFailed(f"the connection to {self._address} broke: {error}") from error

    def close(self) -> None:
        """Close the connections, which cancels their requests."""
        self._client.close()

    def _deltas(self, request: Request, response: httpx.Response, deadline: float) -> Iterator[Delta]:
        if not request.stream:
            yield decode(_json_object(response.read()))
            return
        for event in parse_events(split_lines(response.iter_bytes())):
            # httpx bounds each read; a server that trickles is bounded here.
            if time.monotonic() > deadline:
                raise _timed_out()
            yield decode(_json_object(event))


def _timed_out() -> RequestTimeout:
    return RequestTimeout("the request took longer than the client's timeout_s; it was cancelled")


def _refusal(code: int, body: bytes) -> ClientError:
    """The error of a response that is not 200. Triton may send it as JSON or as a server-sent event."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        message = str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {code}: {text[:200]}"
    return error_for(_STATUS_OF_CODE.get(code, "INTERNAL"), message)


def encode(request: Request) -> dict[str, Any]:
    """The JSON body of a request."""
    body: dict[str, Any] = {**request.strings(), **request.flags()}
    if request.token_ids is not None:
        body["input_ids"] = list(request.token_ids)
    return body


def decode(body: dict[str, Any]) -> Delta:
    """The delta in a response's JSON. Raises the error that it holds instead, if it does."""
    if "error" in body:
        # An error after the stream has begun comes without a status.
        raise Internal(str(body["error"]))
    finish_reason, stats = body.get("finish_reason"), body.get("spec_stats")
    # Triton writes a tensor of one element as a bare value.
    ids = body.get("token_ids", [])
    token_ids = tuple(ids) if isinstance(ids, list) else (ids,)
    return Delta(
        text=_first(body.get("text_output")) or "",
        token_ids=token_ids,
        num_output_tokens=_first(body.get("num_output_tokens", len(token_ids))),
        num_input_tokens=_first(body.get("num_input_tokens")),
        finish_reason=None if _first(finish_reason) in (None, "", "None") else _first(finish_reason),
        spec_stats=json.loads(_first(stats)) if _first(stats) else None,
    )


def _first(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if value else None
    return value


def _json_object(text: str | bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Internal(f"the server sent something that is not a JSON object: {text[:200]!r}")
    return body


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a UTF-8 body. Only newlines end a line: httpx's own splitter also breaks at U+2028 and U+0085,
    which Triton leaves unescaped inside JSON."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", errors="replace")
    if rest:
        yield rest.decode("utf-8", errors="replace")


def parse_events(lines: Iterable[str]) -> Iterator[str]:
    """The data of each server-sent event: its `data:` lines joined, ended by an empty line.

    Comments and other fields are skipped; an event that the connection cut off, with no empty line after it, is not
    yielded, as the standard has it.
    """
    data: list[str] = []
    for line in lines:
        if line:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
        elif data:
            yield "\n".join(data)
            data = []
