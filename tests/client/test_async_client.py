"""The asynchronous client against a real Triton server with a toy model, over both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_client import (
    AsyncDFlashClient,
    Cancelled,
    ConnectionFailed,
    GenerationResult,
    Internal,
    InvalidArgument,
    NotFound,
    RequestTimeout,
    Unavailable,
)
from tests.client.conftest import one_more_cancellation

pytestmark = pytest.mark.server

TEXT = "héllo wörld \u2028 日本語"


class Run(Protocol):
    """See `run`."""

    protocol: str

    def __call__(
        self,
        body: Callable[[AsyncDFlashClient], Awaitable[None]],
        model: str = "dflash",
        timeout_s: float = 20.0,
        retries: int = 0,
    ) -> None: ...


@pytest.fixture(params=["grpc", "http"])
def run(request: pytest.FixtureRequest, toy: TritonServer) -> Run:
    """Runs a coroutine with a client of the toy server, for each protocol."""
    url = toy.grpc_url if request.param == "grpc" else toy.http_url

    def run(
        body: Callable[[AsyncDFlashClient], Awaitable[None]],
        model: str = "dflash",
        timeout_s: float = 20.0,
        retries: int = 0,
    ) -> None:
        async def main() -> None:
            async with AsyncDFlashClient(url, request.param, model, timeout_s, retries) as client:
                await body(client)

        asyncio.run(main())

    run.protocol = request.param
    return run


def told(run: Run, prompt: str) -> bool:
    """Whether the server is told that the client cancelled; see `one_more_cancellation`."""
    return run.protocol == "grpc" or prompt == "forever"


def test_generate_and_stream_give_what_the_synchronous_client_gives(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        result = await client.generate(TEXT, max_tokens=100)
        deltas = [delta async for delta in client.stream(TEXT, max_tokens=100)]
        assert (result.text, result.token_ids, result.finish_reason) == (TEXT, tuple(TEXT.encode()), "stop")
        assert [delta.text for delta in deltas] == list(TEXT)
        assert GenerationResult.from_deltas(deltas) == result

    run(body)


def test_many_requests_run_at_the_same_time(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        results = await asyncio.gather(*(client.generate(f"prompt {i}") for i in range(32)))
        assert [result.text for result in results] == [f"prompt {i}" for i in range(32)]

    run(body)


def test_n_completions_are_told_apart(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        result = await client.generate("abc", n=2)
        assert [completion.text for completion in result.completions] == ["abc", "ab"]

    run(body)


def test_leaving_the_loop_cancels_the_request(run: Run, cancel_log: Path) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async for delta in client.stream("forever"):
            assert delta.text == "x"
            break
        # The loop must turn for the request to be cancelled: the program goes on.
        await asyncio.to_thread(cancelled.wait)

    with one_more_cancellation(cancel_log) as cancelled:
        run(body)


def test_leaving_a_with_block_cancels_the_request(run: Run, cancel_log: Path) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async with client.stream("forever") as stream:
            assert (await anext(stream)).text == "x"
        await asyncio.to_thread(cancelled.wait)

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
        await asyncio.to_thread(cancelled.wait)

    with one_more_cancellation(cancel_log) as cancelled:
        run(body)
    assert unfinished == []


@pytest.mark.parametrize("prompt", ["forever", "silent"])
def test_cancelling_the_task_cancels_the_request(run: Run, cancel_log: Path, prompt: str) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        async def read() -> None:
            async for _ in client.stream(prompt):
                pass

        task = asyncio.create_task(read())
        await asyncio.wait([task], timeout=0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(cancelled.wait)

    with one_more_cancellation(cancel_log, told(run, prompt)) as cancelled:
        run(body)


@pytest.mark.parametrize("prompt", ["forever", "silent"])
def test_cancel_ends_the_wait_for_a_delta(run: Run, cancel_log: Path, prompt: str) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        stream = client.stream(prompt)
        asyncio.get_running_loop().call_later(0.3, stream.cancel)
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await asyncio.to_thread(cancelled.wait)

    with one_more_cancellation(cancel_log, told(run, prompt)) as cancelled:
        run(body)


@pytest.mark.parametrize("prompt", ["forever", "silent"])
def test_the_timeout_holds_for_the_whole_request(run: Run, cancel_log: Path, prompt: str) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        with pytest.raises(RequestTimeout, match="timeout_s"):
            async for _ in client.stream(prompt):
                pass
        await asyncio.to_thread(cancelled.wait)

    with one_more_cancellation(cancel_log, told(run, prompt)) as cancelled:
        run(body, timeout_s=0.3)


def test_errors_have_their_kinds(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        with pytest.raises(InvalidArgument, match="^toy says INVALID_ARG$"):
            await client.generate("error INVALID_ARG")
        stream = client.stream("break INTERNAL")
        assert (await anext(stream)).text == "partial"
        with pytest.raises(Internal, match="toy says INTERNAL"):
            await anext(stream)

    run(body)


def test_an_unknown_model_is_not_found_and_not_ready(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        with pytest.raises(NotFound, match="nope"):
            await client.generate("x")
        assert not await client.ready()
        with pytest.raises(RequestTimeout, match="not ready"):
            await client.wait_ready(0.2)

    run(body, model="nope")


def test_a_busy_server_is_asked_again_only_as_often_as_allowed(run: Run) -> None:
    async def body(client: AsyncDFlashClient) -> None:
        assert await client.ready()
        assert (await client.generate(f"busy async-{client.protocol}-a 2")).text.startswith("busy")
        with pytest.raises(Unavailable, match="try again later"):
            await client.generate(f"busy async-{client.protocol}-b 3")

    run(body, retries=2)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_server_is_a_failed_connection_that_names_the_address(protocol: str, unused_address: str) -> None:
    async def main() -> None:
        async with AsyncDFlashClient(unused_address, protocol, timeout_s=5) as client:  # type: ignore[arg-type]
            with pytest.raises(ConnectionFailed, match=unused_address):
                await client.generate("p")

    asyncio.run(main())
