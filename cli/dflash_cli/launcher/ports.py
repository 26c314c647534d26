"""Ports of a server to be started: are they free, and which ones are."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dflash_cli.launcher.triton_install import LauncherError

# Where a free port is looked for: above those that well-known programs listen on. And how often.
LOWEST_PORT, NUM_TRIES = 20_000, 20


class AddressError(LauncherError):
    """An address or a port of this machine cannot be listened on: not a wrong option, it may be free later."""


def settle_ports(host: str, ports: Mapping[str, int]) -> dict[str, int]:
    """Replace each port 0 by a free one and check that the others are free.

    `ports` maps the option that sets a port (`--http-port`) to its number. Raises `LauncherError` with the port and
    the option to change: `AddressError` where the port is taken.
    """
    settled: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        # Held together and the given ones first, so that no two options get the same port.
        for option, port in sorted(ports.items(), key=lambda item: item[1] == 0):
            if port and port in settled.values():
                other = next(name for name, number in settled.items() if number == port)
                raise LauncherError(f"{other} and {option} are both {port}; give each its own port")
            probe = _bind(host, port, option) if port else _bind_free(host, option, settled.values())
            settled[option] = held.enter_context(probe).getsockname()[1]
    return settled


def reachable_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def numeric_host(host: str) -> str:
    """The address that a name stands for, the first of several; an address as it is. Raises `LauncherError`."""
    return str(_found(host, 0)[4][0])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`. False for a name that is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def ports_of_listeners() -> range:
    """Ports that this machine gives to no connection that it opens: on Linux those below its range for these."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return range(LOWEST_PORT, max(LOWEST_PORT, first))


def _bind_free(host: str, option: str, settled: Collection[int]) -> socket.socket:
    """A free port that is none of those settled. Until its server listens, which may take seconds, no connection of
    this machine gets it, as one may get the port that the system itself would choose."""
    probe = _bind(host, 0, option)
    # The settled ones are bound, but by sockets that let others bind them until they listen.
    candidates = [port for port in ports_of_listeners() if port not in settled]
    for port in random.sample(candidates, min(NUM_TRIES, len(candidates))):
        with contextlib.suppress(LauncherError):
            better = _bind(host, port, option)
            probe.close()
            return better
    return probe


def _found(host: str, port: int) -> tuple[Any, ...]:
    """What the system says first of an address. Raises `LauncherError`."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise LauncherError(f"the address {host!r} is not known ({error}); change it with --host") from error


def _bind(host: str, port: int, option: str) -> socket.socket:
    probe = socket.socket(_found(host, port)[0], socket.SOCK_STREAM)
    # As servers do: a port whose last connections are still closing is free, one with a listener is not.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise AddressError(_why(host, port, option, error)) from error
    return probe


def _why(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another program; choose another one with {option}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than you have; choose one of 1024 or more with {option}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; change it with --host"
    return f"cannot listen on port {port} of {host} ({error.strerror}); change it with {option} or --host"
