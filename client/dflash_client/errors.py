"""What can go wrong with a request, as exceptions. Raised by `DFlashClient`, shown by the command line."""

from __future__ import annotations

from typing import ClassVar


class ClientError(Exception):
    """A request failed. `status` names the kind as gRPC does, and the text says what to do about it."""

    status: ClassVar[str] = "UNKNOWN"


class InvalidArgument(ClientError):
    """The server refuses the request as it is; sending it again changes nothing."""

    status = "INVALID_ARGUMENT"


class NotFound(ClientError):
    """The server has no model of that name."""

    status = "NOT_FOUND"


class Unavailable(ClientError):
    """The server cannot take the request now: its queue is full, or it is starting or stopping."""

    status = "UNAVAILABLE"


class Cancelled(ClientError):
    """The request was cancelled before it ended."""

    status = "CANCELLED"


class RequestTimeout(ClientError):
    """The client's `timeout_s` passed. The request was cancelled."""

    status = "DEADLINE_EXCEEDED"


class Internal(ClientError):
    """The server failed while it worked on the request."""

    status = "INTERNAL"


class ConnectionFailed(ClientError):
    """No server could be reached, or the connection broke."""

    status = "CONNECTION_FAILED"


_BY_STATUS: dict[str, type[ClientError]] = {
    kind.status: kind
    for kind in (InvalidArgument, NotFound, Unavailable, Cancelled, RequestTimeout, Internal, ConnectionFailed)
}


def error_for(status: str, message: str) -> ClientError:
    """The exception for a gRPC status name; kinds without a class of their own are `Internal`."""
    return _BY_STATUS.get(status, Internal)(message)
