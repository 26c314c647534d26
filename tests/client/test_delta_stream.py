"""The client's side of delta streams, against a server that sends what the test says, in the order that it says."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client import AsyncDFlashClient, delta_stream
from dflash_client.errors import Cancelled, ClientError, ConnectionLost, Internal, RequestTimeout

LIMIT_S = 20.0


def response(text: str = "", ids: tuple[int, ...] = (), batches: int | None = None, end: str = "") -> Any:
    """A response of the server."""
    message = service_pb2.ModelStreamInferResponse()
    infer = message.infer_response

    def add(name: str, datatype: str, data: bytes) -> None:
        infer.outputs.add(name=name, datatype=datatype, shape=[1])
        infer.raw_output_contents.append(data)

    def texts(name: str, value: str) -> None:
        add(name, "BYTES", len(value.encode()).to_bytes(4, "little") + value.encode())

    texts("text_output", text)
    texts("finish_reason", end or "None")
    add("token_ids", "INT32", b"".join(token_id.to_bytes(4, "little") for token_id in ids))
    add("num_output_tokens", "UINT32", len(ids).to_bytes(4, "little"))
    if batches is not None:
        add("delta_batches", "INT64", batches.to_bytes(8, "little"))
    return message


class Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """What a test sends by `send` and `batch`. names: of the requests, what they named. known: whether it has delta
    streams."""

    def __init__(self) -> None:
        self.known = True
        self.names: list[str | None] = []
        self.opened: list[str] = []
        self.own: list[asyncio.Queue[Any]] = []
        self.together: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = 0

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        request = await anext(requests)
        inputs = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
        named = inputs["delta_stream"][4:].decode() if "delta_stream" in inputs else None
        if len(inputs) == 1 and named is not None:
            self.opened.append(named)
            if not self.known:
                yield service_pb2.ModelStreamInferResponse(error_message="unexpected inference input 'delta_stream'")
                return
            source = self.together = asyncio.Queue()
            yield response("[]")
        else:
            self.names.append(named)
            source = asyncio.Queue()
            self.own.append(source)
        try:
            while (message := await source.get()) is not None:
                if isinstance(message, str):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, message)
                yield message
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def key(self, number: int) -> str:
        """The key of the request of this number."""
        named = self.names[number]
        assert named is not None
        assert named.startswith(f"{self.opened[-1]}/")
        return named.partition("/")[2]

    def batch(self, *entries: list[Any]) -> None:
        """Send a batch."""
        self.together.put_nowait(response(json.dumps(entries)))


def run(test: Callable[[Server, AsyncDFlashClient], Awaitable[None]], opens: bool = True) -> Server:
    """Run a test with a server and a client. opens: the client's delta stream is there when the test begins."""

    async def main() -> Server:
        service, server = Server(), grpc.aio.server()
        service.known = opens
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = AsyncDFlashClient(f"127.0.0.1:{port}", timeout_s=LIMIT_S, share_deltas=True)
        try:
            async with asyncio.timeout(LIMIT_S), client:
                await begin(service, client)
                await test(service, client)
        finally:
            await server.stop(0)
        return service

    return asyncio.run(main())


async def begin(service: Server, client: AsyncDFlashClient) -> None:
    """The request that has the client open its stream; it comes alone."""
    number = len(service.own)
    asking = asyncio.create_task(texts(client))
    await until(lambda: len(service.own) > number and service.opened)
    service.own[number].put_nowait(response("alone", (1,), end="stop"))
    service.own[number].put_nowait(None)
    assert await asking == ["alone"]
    assert service.names[number] is None
    await until(lambda: not service.known or client._transport._delta_streams["dflash"]._stream.is_open)


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def texts(client: AsyncDFlashClient, got: list[Any] | None = None, **sampling: Any) -> list[str]:
    """The texts of a stream's deltas; they are also put into `got` as they come."""
    got = [] if got is None else got
    async for delta in client.stream("Hello", **sampling):
        got.append(delta)
    return [delta.text for delta in got]


async def begun(
    service: Server, client: AsyncDFlashClient, **sampling: Any
) -> tuple[Any, list[Any], asyncio.Queue[Any]]:
    """A request that names the stream: its task, its deltas, and what it is answered by."""
    number, got = len(service.own), list[Any]()
    task = asyncio.create_task(texts(client, got, **sampling))
    await until(lambda: len(service.own) > number)
    return task, got, service.own[number]


def test_deltas_of_two_requests_come_in_one_batch_between_their_own_responses() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        (a, of_a, own_a), (b, _, own_b) = await begun(service, client), await begun(service, client)
        own_a.put_nowait(response("a1", (1,)))
        own_b.put_nowait(response("b1", (1,)))
        await until(lambda: len(of_a) == 1)
        service.batch([service.key(1), "a2", [2]], [service.key(2), "b2", [2, 3]])
        await until(lambda: len(of_a) == 2)
        assert (of_a[1].token_ids, of_a[1].num_output_tokens, of_a[1].steps) == ((2,), 1, None)
        for own, text in ((own_a, "a3"), (own_b, "b3")):
            own.put_nowait(response(text, (9,), 1, end="length"))
            own.put_nowait(None)
        assert await a == ["a1", "a2", "a3"]
        assert "".join(await b) == "b1b2b3"
        assert of_a[-1].finish_reason == "length"
        assert not client._transport._delta_streams["dflash"]._stream._inboxes, "of requests that have ended"

    service = run(test)
    assert len(set(service.names)) == 3
    assert len(service.opened) == 1


def test_a_last_response_waits_for_the_batches_before_it() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        own.put_nowait(response("4", (4,), 2, end="stop"))
        own.put_nowait(None)
        await asyncio.sleep(0.1)
        assert [delta.text for delta in got] == ["1"]
        service.batch([service.key(1), "2", [2]])
        await until(lambda: len(got) == 2)
        service.batch([service.key(1), "3", [3]])
        assert await a == ["1", "2", "3", "4"]

    run(test)


def test_a_first_response_comes_before_batches_that_were_faster() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        service.batch([service.key(1), "2", [2]])
        service.batch([service.key(1), "3", [3]])
        await asyncio.sleep(0.1)
        assert not got
        own.put_nowait(response("1", (1,)))
        await until(lambda: len(got) == 2)
        own.put_nowait(response("4", (4,), 2, end="stop"))
        own.put_nowait(None)
        assert await a == ["1", "23", "4"]

    run(test)


def test_an_answer_may_begin_in_a_batch() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        (a, of_a, own_a), (b, of_b, own_b) = await begun(service, client), await begun(service, client)
        service.batch([service.key(1), "1", [1], None, True], [service.key(2), "1", [1], [[1, 0, 1]], True])
        await until(lambda: of_a and of_b)
        assert of_a[0].steps is None
        assert len(of_b[0].steps) == 1
        service.batch([service.key(1), "2", [2]])
        service.batch([service.key(1), "3", [3]])
        await until(lambda: "".join(delta.text for delta in of_a) == "123")
        own_a.put_nowait(response("4", (4,), 3, end="stop"))
        own_a.put_nowait(None)
        assert "".join(await a) == "1234"
        own_b.put_nowait(service_pb2.ModelStreamInferResponse(error_message="INTERNAL: it broke"))
        own_b.put_nowait(None)
        with pytest.raises(Internal, match="it broke"):
            await b

    run(test)


def test_an_answer_whose_last_response_does_not_come_broke_off() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        service.batch([service.key(1), "1", [1], None, True])
        await until(lambda: got)
        own.put_nowait(None)
        with pytest.raises(ConnectionLost, match="the answer broke off"):
            await a

    run(test)


def test_an_answer_that_begins_in_a_batch_is_whole_when_all_of_it_waits() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        stream, number = client.stream("Hello"), len(service.own)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: len(service.own) > number)
        service.own[number].put_nowait(response("3", (3,), 2, end="stop"))
        service.own[number].put_nowait(None)
        await asyncio.sleep(0.1)
        assert not reading.done(), "the last response comes after its batches"
        service.batch([service.key(1), "1", [1], None, True])
        service.batch([service.key(1), "2", [2]])
        first = await reading
        assert "".join([first.text, *[delta.text async for delta in stream]]) == "123"

    run(test)


def test_what_waits_for_its_reader_is_one_delta() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        stream = client.stream("Hello", return_steps=True)
        number = len(service.own)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: len(service.own) > number)
        service.own[number].put_nowait(response("1"))
        assert (await reading).text == "1"
        for text in "abc":
            service.batch([service.key(1), text, [ord(text)], [[1, 2, 1]]])
        await asyncio.sleep(0.1)
        delta = await anext(stream)
        assert (delta.text, delta.token_ids, len(delta.steps)) == ("abc", (97, 98, 99), 3)
        await stream.aclose()

    assert run(test).cancelled >= 1, "the request that was left"


def test_batches_of_requests_that_have_ended_are_passed_over() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        a.cancel()
        await asyncio.wait([a])
        b, got_b, own_b = await begun(service, client)
        own_b.put_nowait(response("1"))
        await until(lambda: got_b)
        service.batch([service.key(1), "late", [1]], [service.key(2), "2", [1]])
        own_b.put_nowait(response("3", (), 1, end="stop"))
        own_b.put_nowait(None)
        assert await b == ["1", "2", "3"]

    run(test)


def test_an_error_comes_after_what_came_before_it() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        service.batch([service.key(1), "2", [1]])
        await until(lambda: len(got) == 2)
        own.put_nowait(service_pb2.ModelStreamInferResponse(error_message="INTERNAL: it broke"))
        own.put_nowait(None)
        with pytest.raises(Internal, match="it broke"):
            await a

    run(test)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_last_response_does_not_wait_for_ever_for_its_batches(how: str) -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        client.timeout_s = 0.5 if how == "deadline" else LIMIT_S
        stream, number = client.stream("Hello"), len(service.own)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: len(service.own) > number)
        service.own[number].put_nowait(response("1"))
        assert (await reading).text == "1"
        service.own[number].put_nowait(response("3", (), 1, end="stop"))
        service.own[number].put_nowait(None)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.2)
        if how == "cancel":
            stream.cancel()
        done, _ = await asyncio.wait([reading], timeout=5)
        assert done
        with pytest.raises(Cancelled if how == "cancel" else RequestTimeout):
            await reading

    run(test)


def test_a_batch_that_comes_while_waiting_for_it_begins_is_not_missed() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        stream = client._transport._delta_streams["dflash"]._stream
        begin = stream.wait_for
        key = service.key(1)

        def comes_first(num_batches: int) -> Any:
            stream._take([[key, "2", [1]]])
            return begin(num_batches)

        stream.wait_for = comes_first
        own.put_nowait(response("3", (), 1, end="stop"))
        own.put_nowait(None)
        assert await a == ["1", "2", "3"]

    run(test)


def test_a_stream_that_breaks_with_deltas_ends_what_waits_for_them() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        own.put_nowait(response("3", (), 2, end="stop"))
        await until(lambda: got)
        service.batch([service.key(1), "2", [1]])
        await until(lambda: client._transport._delta_streams["dflash"]._stream.num_batches == 1)
        await asyncio.sleep(0.05)  # it waits for the second one
        service.together.put_nowait("it broke")
        with pytest.raises(ConnectionLost, match="carried the deltas of this request broke; send it again"):
            await a
        assert [delta.text for delta in got] == ["1", "2"]

    run(test)


def test_a_stream_that_the_server_ends_takes_nothing_along_and_is_opened_anew() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        service.batch([service.key(1), "2", [1]])
        service.together.put_nowait(None)
        await until(lambda: client._transport._delta_streams["dflash"]._stream.has_ended)
        own.put_nowait(response("3", (), 1))
        own.put_nowait(response("4", (), 1, end="stop"))
        own.put_nowait(None)
        assert await a == ["1", "2", "3", "4"]
        b, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got and len(service.opened) == 2)
        service.batch([service.key(2), "2", [1]])
        own.put_nowait(response("3", (), 1, end="stop"))
        own.put_nowait(None)
        assert await b == ["1", "2", "3"], "one that began before the new stream was open"
        assert len(set(service.opened)) == 2

    run(test)


def test_a_server_without_delta_streams_is_asked_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        await until(lambda: client._transport._delta_streams["dflash"]._stream.has_ended)
        for _ in range(2):
            await begin(service, client)
        assert len(service.opened) == 1
        monkeypatch.setattr(delta_stream, "REFUSED_S", 0.0)
        await begin(service, client)
        await until(lambda: len(service.opened) == 2)

    assert run(test, opens=False).names == [None] * 4


def test_what_does_not_stream_names_no_stream() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        number = len(service.own)
        asking = asyncio.create_task(client.generate("Hello"))
        await until(lambda: len(service.own) > number)
        service.own[number].put_nowait(response("whole", end="stop"))
        service.own[number].put_nowait(None)
        assert (await asking).text == "whole"
        assert service.names[-1] is None

    run(test)


def test_closing_the_client_ends_stream_and_requests() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        await client.close()
        with pytest.raises(ClientError):
            await a
        await until(lambda: service.cancelled == 2)

    run(test)


@pytest.mark.parametrize("protocol", ["http"])
def test_over_http_it_changes_nothing(protocol: str) -> None:
    async def main() -> None:
        async with AsyncDFlashClient("127.0.0.1:1", protocol, share_deltas=True):
            pass

    asyncio.run(main())


def written(*batches: list[Any]) -> bytes:
    """Batches as a server on this machine writes them."""
    texts = [json.dumps(batch).encode() for batch in batches]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def connected(service: Server) -> socket.socket:
    """A connection to the socket of the client's stream."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(delta_stream.SOCKET_PREFIX + service.opened[-1])
    return connection


def test_batches_come_by_a_socket_in_whatever_pieces() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        with connected(service) as connection:
            a, got, own = await begun(service, client)
            own.put_nowait(response("1"))
            await until(lambda: got)
            key = service.key(1)
            data = written([[key, "2", [2]]], [[key, "3", [3]]], [[key, "4", [4]]])
            for at in range(0, len(data), 7):
                connection.send(data[at : at + 7])
                await asyncio.sleep(0.002)
            connection.send(written([[key, "5", [5]]], [[key, "6", [6]]]))
            own.put_nowait(response("7", (7,), 5, end="stop"))
            own.put_nowait(None)
            assert "".join(await a) == "1234567"

    run(test)


def test_the_servers_socket_is_the_first_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with connected(service) as of_another:
            of_another.setblocking(False)
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(of_another, 1) == b""
        monkeypatch.setattr(os, "geteuid", lambda: user)
        with connected(service) as first:
            await until(lambda: refuses(service))
            a, got, own = await begun(service, client)
            own.put_nowait(response("1"))
            await until(lambda: got)
            first.send(written([[service.key(1), "2", [2]]]))
            own.put_nowait(response("3", (3,), 1, end="stop"))
            own.put_nowait(None)
            assert await a == ["1", "2", "3"]

    run(test)


def refuses(service: Server) -> bool:
    """Whether the client's socket takes no other connection."""
    try:
        connected(service).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("num_written", [1, 2])
def test_a_socket_that_the_server_closes_ends_the_stream_after_what_it_wrote(num_written: int) -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        connection = connected(service)
        a, got, own = await begun(service, client)
        own.put_nowait(response("1"))
        await until(lambda: got)
        key = service.key(1)
        connection.send(written(*([[key, str(number + 2), [2]]] for number in range(num_written))))
        connection.close()
        own.put_nowait(response("4", (3,), 2, end="stop"))
        own.put_nowait(None)
        if num_written == 2:
            assert "".join(await a) == "1234"
        else:
            with pytest.raises(ConnectionLost):
                await a
        await until(lambda: client._transport._delta_streams["dflash"]._stream.has_ended)

    run(test)


def test_batches_in_a_socket_outlive_the_grpc_stream() -> None:
    async def test(service: Server, client: AsyncDFlashClient) -> None:
        with connected(service) as connection:
            a, got, own = await begun(service, client)
            own.put_nowait(response("1"))
            await until(lambda: got)
            service.together.put_nowait(None)  # the gRPC stream ends
            own.put_nowait(response("3", (3,), 1, end="stop"))
            own.put_nowait(None)
            await asyncio.sleep(0.2)
            connection.send(written([[service.key(1), "2", [2]]]))
            assert await a == ["1", "2", "3"]

    run(test)


def test_a_socket_that_stays_open_after_the_stream_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_stream, "LAST_S", 0.2)

    async def test(service: Server, client: AsyncDFlashClient) -> None:
        with connected(service):
            await until(lambda: refuses(service))
            service.together.put_nowait(None)
            await until(lambda: client._transport._delta_streams["dflash"]._stream.has_ended)

    run(test)
