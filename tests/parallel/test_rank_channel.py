"""ZeroMQ between ranks: for known keys alone, and an end that is noticed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from dflash_backend.parallel.channel import Endpoint

HOST = "127.0.0.1"
WAIT_MS = 10_000
# How long a message that must not come is waited for.
QUIET_MS = 500
# Binds a socket for the key that it is given, says where, and lives until it is ended.
PEER = f"""
import sys, time
from dflash_backend.parallel.channel import Endpoint
endpoint = Endpoint()
endpoint.known_keys.add(sys.argv[1].encode())
passes, port = endpoint.bind({HOST!r})
print(port, endpoint.public_key.decode(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def ends() -> Iterator[tuple[Endpoint, Endpoint]]:
    """One that binds and one that connects."""
    endpoints = Endpoint(), Endpoint()
    yield endpoints
    for endpoint in endpoints:
        endpoint.close()


def test_messages_come_in_order_from_a_process_whose_key_is_known(ends: tuple[Endpoint, Endpoint]) -> None:
    server, client = ends
    received, port = server.bind(HOST)
    server.known_keys.add(client.public_key)
    sending, _ = client.connect(HOST, port, server.public_key, WAIT_MS / 1000)
    for index in range(100):
        sending.send(b"%d" % index)
    for index in range(100):
        assert received.poll(WAIT_MS)
        assert received.recv() == b"%d" % index


def test_a_process_whose_key_is_not_known_sends_nothing(ends: tuple[Endpoint, Endpoint]) -> None:
    server, client = ends
    received, port = server.bind(HOST)
    sending, _ = client.connect(HOST, port, server.public_key, WAIT_MS / 1000)
    sending.send(b"harm", zmq.NOBLOCK)
    assert not received.poll(QUIET_MS)


def test_a_process_without_keys_sends_nothing(ends: tuple[Endpoint, Endpoint]) -> None:
    received, port = ends[0].bind(HOST)
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{HOST}:{port}")
        plain.send(b"harm", zmq.NOBLOCK)
        assert not received.poll(QUIET_MS)


def test_a_server_with_another_key_receives_nothing(ends: tuple[Endpoint, Endpoint]) -> None:
    server, client = ends
    received, port = server.bind(HOST)
    server.known_keys.add(client.public_key)
    sending, _ = client.connect(HOST, port, Endpoint().public_key, WAIT_MS / 1000)
    sending.send(b"secret", zmq.NOBLOCK)
    assert not received.poll(QUIET_MS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_and_the_silence_of_the_other_process_are_noticed(
    ends: tuple[Endpoint, Endpoint], number: signal.Signals
) -> None:
    client = ends[1]
    command = [sys.executable, "-c", PEER, client.public_key.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        try:
            assert peer.stdout is not None
            port, key = peer.stdout.readline().split()
            sending, ended = client.connect(HOST, int(port), key, silence_s=1.5)
            sending.send(b"x")
            assert not ended.poll(QUIET_MS)
            peer.send_signal(number)
            assert ended.poll(WAIT_MS)
        finally:
            peer.kill()
