"""A stream whose request is refused ends by itself. Triton 2.51 keeps one for ever that is cancelled in that moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from dflash_client import AsyncDFlashClient, ClientError, DFlashClient, grpc_transport
from dflash_client.errors import ConnectionLost, Internal, Unavailable
from dflash_client.grpc_messages import read_response
from tests.client.blocking import BlockingClient
from tests.support.waiting import eventually


class Refusing(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Refuses each request, and ends the stream so many seconds later. cancelled: of each, whether the client cancelled
    it before that."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.cancelled = seconds, list[bool]()

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        list(requests)
        yield service_pb2.ModelStreamInferResponse(error_message="INVALID_ARGUMENT: no")
        end = time.monotonic() + self._seconds
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.01)
        self.cancelled.append(not context.is_active())


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[tuple[Refusing, str]]:
    """A server whose streams end so long after their error as the test says, and its address."""
    service, server = Refusing(request.param), grpc.server(futures.ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait(5)


class Large(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with a text of 3 and one of 200,000 bytes."""

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        list(requests)
        for text in ("abc", "x" * 200_000):
            answer = service_pb2.ModelStreamInferResponse()
            answer.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            answer.infer_response.raw_output_contents.append(len(text).to_bytes(4, "little") + text.encode())
            yield answer


def test_a_large_response_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, bool] = {}

    def read(data: bytes) -> Any:
        threads[len(data) // 100_000] = threading.current_thread() is threading.main_thread()
        return read_response(data)

    async def ask(address: str) -> list[int]:
        async with AsyncDFlashClient(address) as client:
            return [len(delta.text) async for delta in client.stream("Hello")]

    monkeypatch.setattr(grpc_transport, "read_response", read)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Large(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    assert asyncio.run(ask(f"127.0.0.1:{port}")) == [3, 200_000]
    server.stop(None).wait(5)
    assert threads == {0: True, 2: False}


class BreaksOff(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Ends each stream after a response that says that the answer goes on."""

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        list(requests)
        answer = service_pb2.ModelStreamInferResponse()
        for name, text in (("text_output", b"a"), ("finish_reason", b"None")):
            answer.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
            answer.infer_response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
        yield answer


@pytest.mark.parametrize("kind", [DFlashClient, BlockingClient])
def test_an_answer_that_ends_in_its_middle_without_an_error_is_not_whole(kind: Any) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(BreaksOff(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with kind(f"127.0.0.1:{port}", timeout_s=None) as client:
        stream = client.stream("Hello")
        assert next(stream).text == "a"
        with pytest.raises(ConnectionLost, match="the answer broke off"):
            next(stream)
    server.stop(None).wait(5)


class Busy(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Refuses each request as one that may be sent again, and counts them."""

    num_requests = 0

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        list(requests)
        self.num_requests += 1
        yield service_pb2.ModelStreamInferResponse(error_message="UNAVAILABLE: the engine died of it")


def test_a_swap_of_the_drafter_is_sent_once() -> None:
    service, server = Busy(), grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with DFlashClient(f"127.0.0.1:{port}", retries=2) as client, pytest.raises(Unavailable):
        client.swap_drafter("d", "k")
    assert service.num_requests == 1
    server.stop(None).wait(5)


def test_bytes_that_are_no_response_are_an_error_of_ours() -> None:
    with pytest.raises(Internal, match="no response of its"):
        read_response(b"no message")


def refused(address: str, with_asyncio: bool) -> None:
    """Send a request that is refused."""

    async def ask() -> None:
        async with AsyncDFlashClient(address) as client:
            with pytest.raises(ClientError, match="no"):
                await client.generate("Hello")

    if with_asyncio:
        asyncio.run(ask())
        return
    with DFlashClient(address) as client, pytest.raises(ClientError, match="no"):
        client.generate("Hello")


@pytest.mark.parametrize("with_asyncio", [False, True])
@pytest.mark.parametrize("serve", [0.3], indirect=True)
def test_a_stream_whose_request_was_refused_is_not_cancelled(serve: tuple[Refusing, str], with_asyncio: bool) -> None:
    service, address = serve
    refused(address, with_asyncio)
    eventually(lambda: service.cancelled == [False])


@pytest.mark.parametrize("with_asyncio", [False, True])
@pytest.mark.parametrize("serve", [30.0], indirect=True)
def test_a_stream_that_goes_on_after_its_error_is_cancelled(
    serve: tuple[Refusing, str], with_asyncio: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "END_S", 0.2)
    service, address = serve
    started = time.monotonic()
    refused(address, with_asyncio)
    assert time.monotonic() - started < 10
    eventually(lambda: service.cancelled == [True])
