"""Errors as OpenAI's API writes them, and which of them a failure behind the front end becomes."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from dflash_client.errors import (
    Cancelled,
    ClientError,
    ConnectionFailed,
    InvalidArgument,
    NotFound,
    QueueFull,
    RequestTimeout,
    Unavailable,
)

_LOG = logging.getLogger("dflash_openai")
# The seconds after which a client may try again.
_RETRY = {"retry-after": "1"}
# OpenAI's clients send what failed with a 500 again. What ends an engine would end it three times, for all.
_NO_RETRY = {"x-should-retry": "false"}
_PARAMETER = re.compile(r"(?:parameter|the grammar in) (['\"])(\w+)\1")


class ApiError(Exception):
    """An answer that is an error: an HTTP status, and OpenAI's message, type, code and parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = headers or {}

    def fields(self) -> dict[str, Any]:
        """The object, as OpenAI writes it, also in a stream that has begun."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        body = msgspec.json.encode(self.fields())
        return Response(body, self.status, media_type="application/json", headers=self.headers)


class ClientGone(Exception):
    """The client has closed its connection and reads no answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be carried out as it is."""
    return ApiError(400, message, code=code, param=param)


@contextlib.contextmanager
def refusing(kind: type[Exception], param: str) -> Iterator[None]:
    """What raises `kind` within it is a request that cannot be carried out as it is, for this parameter."""
    try:
        yield
    except kind as error:
        raise invalid(str(error), param) from None


def defect(what: str, error: Exception) -> ApiError:
    """What an error that nothing expects is to the client of a request; the log gets its words."""
    _LOG.error("%s failed", what, exc_info=error)
    return ApiError(500, "the front end failed at this request; its log says why", "api_error", "internal_error")


def unavailable(message: str) -> ApiError:
    """A request that may be sent again later."""
    return ApiError(503, message, "service_unavailable_error", "unavailable", headers=_RETRY)


def from_client_error(error: ClientError, names: Mapping[str, str]) -> ApiError:
    """What a failure behind the front end is to its client, which calls some parameters of the model by other `names`:
    the model's name -> the client's."""
    message = str(error)
    if isinstance(error, InvalidArgument):
        found = _PARAMETER.search(message)
        if found is None:
            return invalid(message)
        param = names.get(found[2], found[2])
        return invalid(f"{message[: found.start(2)]}{param}{message[found.end(2) :]}", param)
    if isinstance(error, QueueFull):
        return ApiError(429, message, "rate_limit_error", "queue_full", headers=_RETRY)
    if isinstance(error, Unavailable | ConnectionFailed | NotFound):
        return unavailable(message)
    if isinstance(error, RequestTimeout):
        return ApiError(504, "the request took longer than this front end allows", "timeout_error", "timeout")
    if isinstance(error, Cancelled):
        return ApiError(499, message, "api_error", "cancelled")
    return ApiError(500, message, "api_error", "internal_error", headers=_NO_RETRY)
