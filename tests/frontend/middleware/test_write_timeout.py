"""The bound on how long a part of a response waits for its client."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from dflash_openai.middleware.write_timeout import ClientTooSlow, WriteTimeoutMiddleware
from tests.frontend.middleware.asgi import http_scope, receiving

TIMEOUT_S = 0.05
PART: Message = {"type": "http.response.body", "body": b"data", "more_body": True}


def run(num_parts: int, read: Send, timeout_s: float = TIMEOUT_S) -> tuple[Scope, list[BaseException]]:
    """An application that sends parts to a client that reads as `read` does: the scope, and what `send` raised."""
    raised: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(num_parts):
            try:
                await send(PART)
            except BaseException as error:
                raised.append(error)
                raise

    async def answer() -> Scope:
        scope = http_scope()
        await WriteTimeoutMiddleware(app, timeout_s)(scope, receiving(), read)
        return scope

    return asyncio.run(answer()), raised


def test_a_client_that_reads_slowly_is_kept_however_long_the_whole_takes() -> None:
    async def slow(message: Message) -> None:
        await asyncio.sleep(TIMEOUT_S / 5)

    scope, raised = run(15, slow)
    assert raised == []
    assert "ended_by" not in scope["state"]


def test_the_time_counts_from_the_part_that_waits() -> None:
    """The timer runs since the first part, and the client stops in the midst of its time."""
    parts = 0

    async def stops(message: Message) -> None:
        nonlocal parts
        parts += 1
        if parts < 4:
            await asyncio.sleep(TIMEOUT_S / 2)
        else:
            began.append(asyncio.get_running_loop().time())
            try:
                await asyncio.Event().wait()
            finally:
                waited.append(asyncio.get_running_loop().time() - began[0])

    began: list[float] = []
    waited: list[float] = []
    scope, raised = run(9, stops)
    assert [type(error) for error in raised] == [ClientTooSlow]
    assert scope["state"]["ended_by"] == "slow client"
    assert waited[0] >= TIMEOUT_S


def test_no_timer_is_left_behind() -> None:
    async def quick(message: Message) -> None:
        pass

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(PART)

    async def answer() -> list[asyncio.TimerHandle]:
        await WriteTimeoutMiddleware(app, 60.0)(http_scope(), receiving(), quick)
        loop = asyncio.get_running_loop()
        return [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]

    assert asyncio.run(answer()) == []


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(PART)

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    async def answer() -> None:
        task = asyncio.ensure_future(WriteTimeoutMiddleware(app, 60.0)(http_scope(), receiving(), stuck))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(answer())
