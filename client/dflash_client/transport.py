"""What the clients ask of a transport: one call for each attempt of a request. Implemented for gRPC and HTTP, each
with and without asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Protocol

from dflash_client.errors import ClientError
from dflash_client.request import Request
from dflash_client.responses import Outputs

CONNECT_TIMEOUT_S = 5.0


class Call(Protocol):
    """One attempt of a request."""

    def responses(self) -> Generator[Outputs, None, None]:
        """Send the request and yield its responses; once. Raises `ClientError`."""
        ...

    def cancel(self) -> None:
        """End the call, at the server too; from any thread, also before it was sent. What waits for a response gets
        an error. Does nothing when the call has ended."""
        ...


class AsyncCall(Protocol):
    """As `Call`, in one event loop."""

    def responses(self) -> AsyncGenerator[Outputs, None]:
        """Send the request and yield its responses; once. Raises `ClientError`."""
        ...

    def cancel(self) -> None:
        """End the call, at the server too; from the thread of the event loop. Does nothing when it has ended."""
        ...


class Transport(Protocol):
    """How requests travel to one server. Deadlines are in the clock of `time.monotonic()`."""

    def call(self, request: Request, deadline: float) -> Call:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        ...

    def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests; None when the server is there and says that it can."""
        ...

    def close(self) -> None:
        """Close the connections, which ends the calls that still run."""
        ...


class AsyncTransport(Protocol):
    """As `Transport`, in one event loop."""

    def call(self, request: Request, deadline: float) -> AsyncCall:
        """A call that ends at `deadline` at the latest; nothing is sent yet."""
        ...

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        """Why the model cannot take requests, or None."""
        ...

    async def close(self) -> None:
        """Close the connections, which ends the calls that still run."""
        ...
