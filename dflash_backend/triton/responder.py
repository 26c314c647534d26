"""Sends the responses of one request to Triton; a failure concerns this request alone.

Every call to Triton can fail: a response goes through shared memory, which may be full. Triton's sender closes before
it stores a last response, so a last response that fails leaves no way to answer. Its size is therefore compared with
the free shared memory first, while an error can still be sent in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_backend.error_text import first_line

SHARED_MEMORY = "/dev/shm"
# The pool of Triton's Python backend grows by whole steps of 1 MiB; and a response is more than its outputs.
GROWTH_BYTES = 2 << 20
OVERHEAD_BYTES = 64 << 10

FitsSharedMemory = Callable[[int], bool]


class Response(NamedTuple):
    """A response of Triton's type, and how many bytes its outputs have."""

    handle: Any
    num_bytes: int


class SendFailed(Exception):
    """A response could not be handed to Triton, or Triton could not be asked. The message is for client and log."""


class Responder:
    """The responses of one request. `fail` raises nothing; `send` and `is_cancelled` only `SendFailed`."""

    def __init__(self, sender: Any, error: Callable[[str, str], Any], final: int, fits: FitsSharedMemory) -> None:
        """`sender`: Triton's response sender. `error`: makes a response of a status and a message. `final`: Triton's
        flag of a last response. `fits`: whether this many bytes fit the shared memory."""
        self._sender = sender
        self._error = error
        self._final = final
        self._fits = fits
        self.num_bytes_sent = 0

    def send(self, response: Response, final: bool) -> None:
        """Send one response; `final`: the last."""
        if final and not self._fits(response.num_bytes):
            raise SendFailed(
                f"an answer of {response.num_bytes / 1e6:.1f} MB does not fit the shared memory between Triton and the "
                f"model ({SHARED_MEMORY}); ask for fewer tokens, completions or log-probabilities, or give the server "
                "more of it (for a container: --shm-size)"
            )
        try:
            self._sender.send(response.handle, flags=self._final if final else 0)
        except Exception as error:  # whatever Triton raises concerns this response alone
            raise SendFailed(f"the answer could not be handed to Triton: {one_line(error)}") from error
        self.num_bytes_sent += response.num_bytes

    def fail(self, status: str, message: str) -> bool:
        """End the request with an error, or without a message if that fails. Returns whether the client was told."""
        try:
            self._sender.send(self._error(status, message), flags=self._final)
        except Exception:  # noqa: BLE001 - the request can only be closed
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the request without another response. Raises nothing: where Triton cannot be reached there is no one to
        tell."""
        with contextlib.suppress(Exception):
            self._sender.send(flags=self._final)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled, or has gone."""
        try:
            return bool(self._sender.is_cancelled())
        except Exception as error:  # whatever Triton raises concerns this request alone
            raise SendFailed(f"Triton could not be asked about the request: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error as one line, without the name of the shared memory, which clients must not see."""
    return f"{type(error).__name__}: {first_line(error).partition(' for key ')[0]}"


def shared_memory_check() -> FitsSharedMemory:
    """A check whether this many bytes fit: the shared memory can grow by them, or Triton's pool has twice as many free,
    since its free memory may be fragmented."""
    try:
        pool = importlib.import_module("c_python_backend_utils").shared_memory
    except (ImportError, AttributeError):  # outside Triton's stub
        pool = None

    def fits(num_bytes: int) -> bool:
        try:
            free = os.statvfs(SHARED_MEMORY)
        except OSError:
            return True
        if num_bytes + GROWTH_BYTES <= free.f_bavail * free.f_frsize:
            return True
        return pool is None or 2 * num_bytes + OVERHEAD_BYTES <= pool.free_memory()

    return fits
