"""ZeroMQ between rank 0 and ranks on other machines, encrypted, and open to these processes alone.

Each side makes a key pair of its own (CURVE, RFC 26) and gives the other its public key by another way. A bound socket
takes connections only from keys that it knows: what comes is unpickled, so a sender may run programs.
"""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

ANY = "*"
# Of ZeroMQ's own, answered without Python: a machine that is gone without a word is noticed by them, from the silence
# that is allowed to this much later.
HEARTBEAT_MS = 500


class Endpoint:
    """The sockets of one process. A socket is for one thread at a time."""

    def __init__(self) -> None:
        self.public_key, self._secret_key = zmq.curve_keypair()
        self.known_keys: set[bytes] = set()
        """The public keys that may connect; to be added to as they become known."""
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ANY, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """As pyzmq's authenticator asks."""
        return key in self.known_keys

    def bind(self, host: str) -> tuple[zmq.Socket[bytes], int]:
        """A socket that receives, at this address of the machine alone, and its port."""
        socket = self._socket(zmq.PULL)
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key
        socket.curve_publickey = self.public_key
        return socket, socket.bind_to_random_port(f"tcp://{_bracketed(host)}")

    def connect(
        self, host: str, port: int, key: bytes, silence_s: float
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket that sends to the process with this public key, and one that receives a message when the connection
        has ended, or was silent for that time. It is not made again: what is lost would be missed."""
        socket = self._socket(zmq.PUSH)
        socket.curve_serverkey = key
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self._secret_key
        socket.reconnect_ivl = -1
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = int(silence_s * 1000)
        ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"tcp://{_bracketed(host)}:{port}")
        return socket, ended

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.ipv6 = True
        socket.set_hwm(0)
        socket.linger = 0
        return socket

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets, which no thread uses any more, once what was sent has left or that time has passed."""
        self._authenticator.stop()
        self._context.destroy(linger=linger_ms)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
