"""What can go wrong with a request, as exceptions."""

from __future__ import annotations

import re
from typing import ClassVar


class ClientError(Exception):
    """A request failed. `status` names the kind as gRPC does, and the text says what to do about it."""

    status: ClassVar[str] = "UNKNOWN"


class InvalidArgument(ClientError):
    """The server refuses the request as it is; sending it again changes nothing."""

    status = "INVALID_ARGUMENT"


class Unauthenticated(ClientError):
    """What stands in front of the server does not know who is calling."""

    status = "UNAUTHENTICATED"


class PermissionDenied(ClientError):
    """What stands in front of the server does not let this caller do this."""

    status = "PERMISSION_DENIED"


class NotFound(ClientError):
    """The server has no model of that name."""

    status = "NOT_FOUND"


class Unavailable(ClientError):
    """The server did not take the request: its queue is full, or it is starting or stopping."""

    status = "UNAVAILABLE"


class QueueFull(Unavailable):
    """The server's queue has no place for the request; it may be sent again later."""


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
    """No server could be reached; the request was not sent."""

    status = "CONNECTION_FAILED"


class ConnectionLost(ConnectionFailed):
    """The connection broke after the request was sent; the server may have worked on it."""

    status = "CONNECTION_LOST"


# Those that a server may send.
_SENT = (InvalidArgument, Unauthenticated, PermissionDenied, NotFound, Unavailable, Cancelled, RequestTimeout, Internal)
_BY_STATUS: dict[str, type[ClientError]] = {kind.status: kind for kind in _SENT}
# The settings that a refusal names when the queue is full.
_QUEUE_LIMITS = ("max_queue_size is", "max_queue_tokens is")
# How Triton 2.51 words the errors of its own that are not the fault of what was sent, and what it does not say of them.
# The first that fits counts.
_TRITONS_WORDS = (
    ("no available versions", "UNAVAILABLE", "; it is loading or unloading, or the server stops: try again later"),
    ("unknown model", "NOT_FOUND", ""),
    # The model's process has died or hangs; `dflash-triton serve` replaces it.
    ("is not healthy", "UNAVAILABLE", ""),
    # A server that stops keeps its connections open, and takes no more requests.
    ("Server is stopping", "UNAVAILABLE", "; try again later, or at another server"),
    ("Server not ready", "UNAVAILABLE", "; it starts or stops: try again later"),
    ("Failed to increase the shared memory pool", "INTERNAL", "; give the server more shared memory (/dev/shm)"),
)
# What Triton puts before the text of some of its errors.
_REQUEST_ID = re.compile(r"\[request id: [^\]]*\] ")


def error_for(status: str, message: str) -> ClientError:
    """The exception for a gRPC status name; kinds without a class of their own are `Internal`."""
    if status == "UNAVAILABLE" and any(limit in message for limit in _QUEUE_LIMITS):
        return QueueFull(message)
    return _BY_STATUS.get(status, Internal)(message)


def error_in_text(message: str, otherwise: str = "INVALID_ARGUMENT") -> ClientError:
    """The exception for an error of which only the text came.

    The model's own errors begin with their status; what Triton refuses before the model sees it does not, and has the
    status `otherwise` unless its words say more. The id of the request, which Triton may put first, is left out.
    """
    message = message[found.end() :] if (found := _REQUEST_ID.match(message)) else message
    status, colon, rest = message.partition(": ")
    if colon and status in _BY_STATUS:
        return error_for(status, rest)
    known = (each[1:] for each in _TRITONS_WORDS if each[0] in message)
    kind, unsaid = next(known, (otherwise, ""))
    return error_for(kind, message + unsaid)


def not_ready(model: str, address: str) -> Unavailable:
    """The error of a model that its server knows no answer of yet."""
    return Unavailable(
        f"the server at {address} says that the model '{model}' is not ready; it is loading, or not there"
    )


def no_answer(address: str, timeout_s: float) -> ConnectionFailed:
    """The error of a server that takes a connection and says nothing."""
    return ConnectionFailed(
        f"{address} has not answered within {timeout_s:g} s; check the address, or whether it hangs"
    )


def timed_out() -> RequestTimeout:
    """The error of a request that the client gave up."""
    return RequestTimeout("the request took longer than the client's timeout_s; it was cancelled")


def cancelled_here() -> Cancelled:
    """The error of a request that this client cancelled."""
    return Cancelled("the request was cancelled")


def refused_caller(status: str, address: str, details: str) -> ClientError:
    """The error of a caller who is not known, or not allowed to do this; `status` says which."""
    what_to_do = "give a valid api_key (--api-key)" if status == "UNAUTHENTICATED" else "ask whoever runs it"
    return error_for(status, f"{address} does not let this request in ({details}); {what_to_do}")


def broke_off() -> ConnectionLost:
    """The error of an answer that ended in its middle, without an error."""
    return ConnectionLost(
        "the answer broke off: the connection ended before the server had said why it ends; a proxy in between may "
        "have closed it"
    )


def untrusted(address: str, why: str) -> ConnectionFailed:
    """The error of a server whose certificate is not accepted."""
    return ConnectionFailed(
        f"the server at {address} is not trusted: {why}; if it has an authority of its own, give that one's "
        "certificate as ca_cert (--ca-cert)"
    )


def no_tls(address: str, scheme: str) -> ConnectionFailed:
    """The error of a server that does not speak TLS, and the scheme to use instead."""
    return ConnectionFailed(f"what answers at {address} does not speak TLS; begin the URL with {scheme}")
