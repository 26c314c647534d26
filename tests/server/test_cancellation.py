"""A client that goes away frees what its request held."""

from __future__ import annotations

from tests.server.conftest import eventually

LONG = {"temperature": 0, "max_tokens": 900, "ignore_eos": True}


def idle(metric) -> bool:
    return metric("dflash:num_requests_running") == 0 == metric("dflash:num_requests_waiting")


def test_closing_a_grpc_stream_cancels_the_request(grpc_client, metric):
    before = metric("dflash:request_errors_total", status="CANCELLED")
    stream = grpc_client.stream("Count to a thousand.", **LONG)
    next(stream)
    stream.close()
    eventually(
        lambda: metric("dflash:request_errors_total", status="CANCELLED") == before + 1, "it counts as cancelled"
    )
    eventually(lambda: idle(metric), "nothing runs")


def test_clients_that_give_up_leave_room_for_the_next(grpc_client, metric):
    streams = [grpc_client.stream(f"Count from {n} to a thousand.", **LONG) for n in range(8)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    assert grpc_client.generate("What is 1 + 1?", temperature=0, max_tokens=4).num_output_tokens == 4
    eventually(lambda: idle(metric), "nothing runs")
