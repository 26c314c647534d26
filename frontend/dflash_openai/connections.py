"""The socket that the front end listens on, and a gate before it: new connections wait while few descriptors are left.

granian's TLS listener does not go on once the process has no descriptor left: it asks for the next connection over and
over, and never looks at those whose handshake is late, not even when all of them have left. So that must not happen.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import socket
import struct
import sys
import threading

# Connections that may wait to be accepted, and requests that may run at the same time.
BACKLOG = 4096
MAX_REQUESTS = 16_384
# Descriptors for other things than connections.
OTHER_FILES = 32
LOOK_S = 0.02
# Fewer are worth a warning: connections of clients, of proxies and to the servers take one each.
FEW_FILES = 1024
_LOG = logging.getLogger("dflash_openai")
# Linux's: a program in the form of classic BPF, here one instruction that drops everything.
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP = struct.pack("@HBBI", 0x06, 0, 0, 0)


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket. Unlike granian's own, no other process can listen beside it. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(address)
    return listener


class ConnectionGate:
    """Keeps new connections out while most descriptors are in use. A thread looks fifty times a second.

    Some descriptors are kept back by the soft limit of open files until the gate is closed: what was in the socket's
    queue is accepted with these, and then those that are silent are seen to be late.
    """

    def __init__(self, listener: socket.socket, most_files: int | None = None) -> None:
        """most_files: descriptors that the process may have; None: as many as the system allows it."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = hard if most_files is None else min(most_files, hard)
        self.backlog = min(BACKLOG, self._most // 8)
        self._kept_back = self.backlog + OTHER_FILES
        # Above this number it closes, an eighth below it opens.
        self._high = min(MAX_REQUESTS + BACKLOG, self._most // 2)
        self._low = self._high * 7 // 8
        self.max_requests = min(MAX_REQUESTS, self._high)
        self.closed = False
        self._listener = listener
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connection-gate", daemon=True)

    def start(self) -> None:
        """Raise the limit of open files, and look from now on. Warns where it stays low."""
        if self._most < FEW_FILES:
            _LOG.warning(
                "this process may have %d files open, so about %d connections; raise the limit (ulimit -n, "
                "LimitNOFILE=)",
                self._most,
                self._high,
            )
        self._set_limit()
        if sys.platform == "linux":
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, num_files: int) -> None:
        """Close or open the gate by the number of descriptors in use."""
        if not self.closed and num_files > self._high:
            self._filter(_ATTACH_FILTER)
            self.closed = True
            self._set_limit()
            _LOG.warning("%d files are open: new connections wait until there are fewer", num_files)
        elif self.closed and num_files < self._low:
            self.closed = False
            self._set_limit()
            self._filter(_DETACH_FILTER)
            _LOG.warning("%d files are open: new connections are taken again", num_files)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(OSError):
                self.look(num_open_files())

    def _set_limit(self) -> None:
        soft = self._most if self.closed else self._most - self._kept_back
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _filter(self, option: int) -> None:
        program = ctypes.create_string_buffer(_DROP)
        value = struct.pack("@HP", 1, ctypes.addressof(program))
        self._listener.setsockopt(socket.SOL_SOCKET, option, value)


def num_open_files() -> int:
    """Descriptors of this process. Raises OSError when there is none left to count them with."""
    # Linux says so from 6.2 on, and 0 before.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
