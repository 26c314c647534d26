"""Reads the bodies of requests at a bounded cost: while one is decoded or its answer is encoded, others wait."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_openai.config import FrontendConfig
from dflash_openai.errors import invalid
from dflash_openai.schemas import Body, GenerationFields, StreamOptions, decode

# A larger body is read, and a larger answer written, in a thread.
LARGE_BYTES = 64 * 1024
# Outside of strings: each colon has a key before it, each comma a value. Keys take most of the time, 0.4 us each.
MAX_KEYS = 50_000
MAX_VALUES = 500_000
# A call into C keeps all other threads waiting: this many bytes are searched, joined or sent, and this many items
# written, in one.
BYTES_A_CALL = 256 * 1024
ITEMS_A_CALL = 256
_ENCODER = msgspec.json.Encoder()
Result = TypeVar("Result")


async def in_thread(num_bytes: int, work: Callable[[], Result]) -> Result:
    """`work()`, in a thread where it has much to do."""
    return await asyncio.to_thread(work) if num_bytes > LARGE_BYTES else work()


async def read_body(request: Request, kind: type[Body], then: Callable[[Body], Result]) -> tuple[Body, Result]:
    """The request in the body, and `then` of it, both made in a thread where the body is large. Raises `ApiError`."""
    raw = without_mark(await request.body())
    config: FrontendConfig = request.app.state.frontend.config

    def read() -> tuple[Body, Result]:
        check_parts(raw)
        body = decode(raw, kind, config.reject_unknown_fields)
        if isinstance(body, GenerationFields):
            _use_defaults(body, config)
        try:
            return body, then(body)
        except RecursionError:
            raise invalid("the body is nested too deeply") from None

    return await in_thread(len(raw), read)


def _use_defaults(body: GenerationFields, config: FrontendConfig) -> None:
    """Set what the server's options say of a chat or a completion."""
    if body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = config.return_tokens_as_token_ids
    if body.stream and config.enable_force_include_usage:
        body.stream_options = msgspec.structs.replace(body.stream_options or StreamOptions(), include_usage=True)


def without_mark(body: bytes) -> bytes:
    """A body without the mark U+FEFF, with which programs of Windows begin UTF-8."""
    return body.removeprefix(codecs.BOM_UTF8)


class _Messages(msgspec.Struct):
    """Whether a body has messages. No objects are made of them."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def has_messages(body: bytes) -> bool:
    """Whether a body is that of a chat."""
    try:
        return msgspec.json.decode(without_mark(body), type=_Messages).messages is not msgspec.UNSET
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def check_parts(body: bytes) -> None:
    """Raise `ApiError` for a body with more keys or values than may be decoded in one go."""
    for sign, most, what in ((b":", MAX_KEYS, "keys of objects"), (b",", MAX_VALUES, "values")):
        if _count(body, sign) > most and _more_outside_strings(body, sign, most):
            raise invalid(f"the body has more than {most} {what}; send less at a time")


def _count(body: bytes, sign: bytes) -> int:
    return sum(body.count(sign, at, at + BYTES_A_CALL) for at in range(0, len(body), BYTES_A_CALL))


def _more_outside_strings(body: bytes, sign: bytes, most: int) -> bool:
    """Whether a JSON text has a sign more than `most` times outside of its strings."""
    found = at = in_string = 0
    while at < len(body) and found <= most:
        end = at + BYTES_A_CALL
        piece = body[at:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # What is escaped belongs to it.
            end += 1
            piece = body[at:end]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        found += b"".join(parts[in_string::2]).count(sign)
        in_string ^= (len(parts) - 1) % 2
        at = end
    return found > most


class Pieces(list[bytes]):
    """JSON in pieces, which are never joined: copying the largest answers would keep all others waiting."""


class PiecesResponse(Response):
    """A response of JSON that is sent piece by piece, with its length; others get on between two of them."""

    def __init__(self, pieces: Pieces) -> None:
        self.status_code, self.background, self._pieces = 200, None, pieces
        self.init_headers({"content-type": "application/json", "content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        # They are let go as they are sent.
        self._pieces.reverse()
        # The client may leave, which `send` may say before `receive` does.
        with contextlib.suppress(OSError):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while self._pieces:
                piece = self._pieces.pop()
                await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})
                await asyncio.sleep(0)


def encoded(value: Any) -> Pieces:
    """`value` as JSON, piece by piece, so that other threads get on meanwhile. Objects in its long lists are let go
    when they are written, since letting them go at once would take long as well."""
    parts: list[bytes] = []
    _encode(value, parts)
    pieces, group, num_bytes = Pieces(), [], 0
    for part in parts:
        group.append(part)
        num_bytes += len(part)
        if num_bytes >= BYTES_A_CALL:
            pieces.append(b"".join(group))
            group, num_bytes = [], 0
    if group:
        pieces.append(b"".join(group))
    return pieces


def _encode(value: Any, parts: list[bytes]) -> None:
    if isinstance(value, Pieces):
        parts.extend(value)
    elif isinstance(value, dict) and any(isinstance(each, dict | list | tuple) for each in value.values()):
        for position, (name, each) in enumerate(value.items()):
            parts.append((b"," if position else b"{") + _ENCODER.encode(str(name)) + b":")
            _encode(each, parts)
        parts.append(b"}")
    elif isinstance(value, list | tuple) and len(value) > ITEMS_A_CALL and not isinstance(value[0], Pieces):
        for start in range(0, len(value), ITEMS_A_CALL):
            piece = value[start : start + ITEMS_A_CALL]
            parts.append((b"," if start else b"[") + _ENCODER.encode(piece)[1:-1])
            if isinstance(value, list) and isinstance(piece[-1], dict | list):
                value[start : start + ITEMS_A_CALL] = [None] * len(piece)
        parts.append(b"]")
    elif isinstance(value, list | tuple) and any(isinstance(each, dict | Pieces) for each in value):
        for position, each in enumerate(value):
            parts.append(b"," if position else b"[")
            _encode(each, parts)
        parts.append(b"]")
    else:
        parts.append(_ENCODER.encode(value))
