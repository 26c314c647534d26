"""A Ray cluster of two nodes on this machine: the one here, and another that can be removed and added again.

The other node is in a network namespace of its own, where this process may make one, so that its network can be taken
away as well; else at another loopback address.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from dflash_cli.launcher.processes import Process, family, gone, send

START_S = 60.0
END_S = 10.0
# Bytes of Ray's store of objects, which nothing here uses: the least that it takes.
STORE_BYTES = 78_643_200


class Network:
    """The addresses of two nodes. separate: the other one has a namespace of its own."""

    def __init__(self, separate: bool) -> None:
        number = os.getpid() % 250
        self.separate = separate
        # Not 127.0.0.1, for which Ray takes the machine's outer address.
        self.here, self.there = "127.0.0.2", "127.0.0.3"
        self.enter: list[str] = []
        if separate:
            self.here, self.there = f"10.213.{number}.1", f"10.213.{number}.2"
            self._name, self._link = f"dflash-{os.getpid()}", f"dfl{os.getpid()}"
            self.enter = ["ip", "netns", "exec", self._name]

    def open(self) -> None:
        """Make the namespace and its link, where there is one. Raises `OSError` when that is not allowed."""
        if not self.separate:
            return
        peer = f"{self._link}p"
        try:
            self._ip("netns", "add", self._name)
            self._ip("link", "add", self._link, "type", "veth", "peer", "name", peer)
            self._ip("link", "set", peer, "netns", self._name)
            self._ip("addr", "add", f"{self.here}/30", "dev", self._link)
            self._ip("link", "set", self._link, "up")
            for command in (["addr", "add", f"{self.there}/30", "dev", peer], ["link", "set", peer, "up"]):
                self._ip("-n", self._name, *command)
            self._ip("-n", self._name, "link", "set", "lo", "up")
        except OSError:
            self.close()
            raise

    def plug(self, connected: bool) -> None:
        """Connect the other node, or take its network away: no message comes through, and no connection ends."""
        self._ip("link", "set", self._link, "up" if connected else "down")

    def close(self) -> None:
        """Remove what `open` made."""
        if self.separate:
            for command in (("link", "del", self._link), ("netns", "del", self._name)):
                with suppress(OSError):
                    self._ip(*command)

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class RayNodes:
    """A context manager: a cluster with both nodes. environ: variables by which a process of this machine finds it.

    Ray listens on all addresses, so the cluster has a token: without one, all who reach it could run programs.
    """

    def __init__(self, separate: bool = False, cpus: int = 1, gpus: int = 0) -> None:
        """separate: the other node gets a network namespace of its own. cpus: in Ray's count, of each node: how many
        ranks it takes. gpus: the same of ranks on GPUs, which need not be there. Raises `OSError` where a namespace is
        not allowed."""
        self.network = Network(separate)
        self._cpus, self._gpus = cpus, gpus
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie in it: a short path
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._address = f"{self.network.here}:{_free_port()}"
        self.environ = {
            "RAY_ADDRESS": self._address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def __enter__(self) -> RayNodes:
        self.network.open()
        try:
            port = self._address.rpartition(":")[2]
            self._start("here", "--head", "--port", port, "--include-dashboard=false", "--disable-usage-stats")
            self.add()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for name in ("there", "here"):
            self._kill(name)
        self.network.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def add(self) -> None:
        """Start the other node, and wait until the cluster has it."""
        if self.network.separate:
            self.network.plug(True)
        self._start("there", "--address", self._address)

    def remove(self) -> None:
        """Kill the other node with all of its processes, as when its machine is reset."""
        self._kill("there")

    def unplug(self) -> None:
        """Take the other node's network away, and leave its processes running until `add`."""
        self.network.plug(False)

    def stop(self) -> None:
        """Stop all processes of the other node, whose connections stay, until `add`."""
        send(self.processes_there(), signal.SIGSTOP)

    def processes_there(self) -> set[Process]:
        """All processes of the other node."""
        return family(self._processes["there"].pid) if "there" in self._processes else set()

    def _start(self, name: str, *options: str) -> None:
        """Start a node and wait until it says that it runs. Raises `OSError` when it does not."""
        self._kill(name)
        enter = self.network.enter if name == "there" else []
        host = self.network.there if name == "there" else self.network.here
        folder = Path(self._directory, name)
        log = Path(self._directory, f"{name}.log")
        ray = Path(sysconfig.get_paths()["scripts"], "ray")
        command = [sys.executable, str(ray), "start", "--block", *options, "--node-ip-address", host]
        command += ["--num-cpus", str(self._cpus), "--num-gpus", str(self._gpus)]
        command += ["--object-store-memory", str(STORE_BYTES), "--temp-dir", str(folder)]
        environ = os.environ | self.environ
        del environ["RAY_ADDRESS"]
        with log.open("wb") as output:
            self._processes[name] = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environ,
            )
        started = _waited(lambda: b"Ray runtime started" in log.read_bytes(), START_S, self._processes[name])
        if not started:
            raise OSError(f"a Ray node did not start: {log.read_text(errors='replace')[-2000:]}")

    def _kill(self, name: str) -> None:
        """Kill a node's processes, those too that began since it started."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        members = family(process.pid)
        send(members, signal.SIGKILL)
        process.wait()
        gone(members, END_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _waited(done: Callable[[], bool], limit_s: float, process: subprocess.Popen[bytes]) -> bool:
    """Wait until it is done; False when the process has ended before, or the time is over."""
    deadline = time.monotonic() + limit_s
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            return done()
        time.sleep(0.05)
    return True
