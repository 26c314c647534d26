"""What only asyncio has of the asynchronous client: many requests in one loop, tasks that end, loops that are left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient
from tests.client.conftest import one_more_cancellation, url_of

pytestmark = pytest.mark.server

Body = Callable[[AsyncDFlashClient], Awaitable[None]]
Run = Callable[[Body], None]


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def run(protocol: Any, toy: TritonServer) -> Run:
    """Runs a coroutine with a client of the toy server."""

    def run(body: Body) -> None:
        async def main() -> None:
            async with AsyncDFlashClient(url_of(toy, protocol), protocol, timeout_s=20.0) as client:
                await body(client)

        asyncio.run(main())

    return run


def test_many_requests_run_at_the_same_time(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        results = await asyncio.gather(*(client.generate(f"prompt {i}") for i in range(32)))
        assert [result.text for result in results] == [f"prompt {i}" for i in range(32)]

    run(body)


def test_leaving_the_loop_cancels_the_request(run: Run, cancel_log: Path) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async for delta in client.stream("forever"):
            assert delta.text == "x"
            break
        # The loop must turn for the request to be cancelled: the program goes on.
        await asyncio.to_thread(cancelled)

    with one_more_cancellation(cancel_log) as cancelled:
        run(body)


def test_leaving_a_with_block_cancels_the_request(run: Run, cancel_log: Path) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async with client.stream("forever") as stream:
            assert (await anext(stream)).text == "x"
        await asyncio.to_thread(cancelled)

    with one_more_cancellation(cancel_log) as cancelled:
        run(body)


def test_closing_the_client_cancels_a_stream_that_was_left_open(run: Run, cancel_log: Path) -> None:
    unfinished = []

    async def body(client: AsyncDFlashClient) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unfinished.append(context))
        stream = client.stream("forever")
        assert (await anext(stream)).text == "x"
        await client.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await asyncio.to_thread(cancelled)

    with one_more_cancellation(cancel_log) as cancelled:
        run(body)
    assert unfinished == []


@pytest.mark.parametrize("prompt", ["forever", "silent"])
def test_cancelling_the_task_cancels_the_request(run: Run, cancel_log: Path, protocol: Any, prompt: str) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async def read() -> None:
            async for _ in client.stream(prompt):
                pass

        task = asyncio.create_task(read())
        await asyncio.wait([task], timeout=0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(cancelled)

    with one_more_cancellation(cancel_log, protocol, prompt) as cancelled:
        run(body)
