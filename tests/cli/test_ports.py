"""Ports: a taken one is refused with the option to change, and 0 finds free ones."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.launcher import ports
from dflash_cli.launcher.ports import reachable_host, settle_ports
from dflash_cli.launcher.triton_install import LauncherError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_with_its_number_and_option(taken: int, host: str) -> None:
    with pytest.raises(LauncherError, match=rf"port {taken} .*taken.*--grpc-port"):
        settle_ports(host, {"--http-port": 0, "--grpc-port": taken})


def test_port_zero_becomes_a_free_port_each() -> None:
    found = settle_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0})
    assert len(set(found.values())) == 3
    assert all(found.values())


def test_a_free_port_is_none_that_a_connection_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [settle_ports("127.0.0.1", {"--http-port": 0})["--http-port"] for _ in range(20)]
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
    assert all(20_000 <= port < int(limits.split()[0]) for port in found)
    assert len(set(found)) > 15
    # Where all of those are taken, or the system has none, it is one that the system chooses.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for left in (range(port, port + 1), range(0)):
            monkeypatch.setattr(ports, "ports_of_listeners", lambda left=left: left)
            assert settle_ports("127.0.0.1", {"x": 0})["x"] not in (0, port)


def test_no_two_options_get_the_same_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    free = settle_ports("127.0.0.1", {"x": 0})["x"]
    monkeypatch.setattr(ports, "ports_of_listeners", lambda: range(free, free + 1))
    found = settle_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0})
    assert found["--http-port"] == free != found["--grpc-port"]


def test_the_same_port_twice_is_refused() -> None:
    free = settle_ports("127.0.0.1", {"x": 0})["x"]
    with pytest.raises(LauncherError, match=rf"--http-port and --grpc-port are both {free}"):
        settle_ports("127.0.0.1", {"--http-port": free, "--grpc-port": free})


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(LauncherError, match="--host"):
        settle_ports(host, {"--http-port": 0})


def test_a_server_on_all_addresses_is_reached_on_the_loopback() -> None:
    assert [reachable_host(host) for host in ("0.0.0.0", "::", "::1", "10.0.0.1")] == [
        "127.0.0.1",
        "[::1]",
        "[::1]",
        "10.0.0.1",
    ]
