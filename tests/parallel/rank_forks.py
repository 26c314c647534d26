"""Ranks as forks of a process that has imported torch and the ranks' code, which takes most of a rank's start.

A fork runs what a rank's process runs, over the same sockets and memory. Tests of the start itself start real ones.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

import dflash_backend
from dflash_backend.parallel.links import RemoteRank
from dflash_backend.parallel.remote import LAST_WORDS_MS, RankAddress, RemoteRankProcess, RemoteRanks
from dflash_backend.parallel.shard import Shard

PYTHON, HOST = sys.executable, "127.0.0.1"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["dflash_backend.parallel.rank", "dflash_backend.parallel.remote"])


class _Descriptor:
    """A file descriptor that a fork gets under a number of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (reduction.DupFd(self.number),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run(source: str, function: str, *arguments: object) -> None:
    """In a fork. source: where the engine has its code from, which differs from what was imported before the fork where
    the engine is that of a mutant."""
    import dflash_backend

    if dflash_backend.__file__ != source:
        for name in [name for name in sys.modules if name.startswith(("dflash_", "tests."))]:
            del sys.modules[name]
    getattr(importlib.import_module(__name__), function)(*arguments)


class Fork:
    """A process that runs a function of this file; as `subprocess.Popen`, as far as ranks are concerned."""

    def __init__(self, function: str, *arguments: object, daemon: bool = True) -> None:
        """daemon: whether it ends with this process, and can start none."""
        arguments = dflash_backend.__file__, function, *arguments
        self._process = _context.Process(target=_run, args=arguments, daemon=daemon)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()

    def poll(self) -> int | None:
        return self._process.exitcode


def run_local(engine: int, stdin: int, memory: int, number: int) -> None:
    """A rank of this machine. number: of the memory's descriptor, as the engine names it."""
    from dflash_backend.parallel import rank, rank_process

    os.dup2(stdin, rank.STDIN)
    os.dup2(memory, number)
    # The engine is the parent of no fork; that it lives is watched all the same.
    os.getppid = lambda: engine  # type: ignore[method-assign]
    status = rank_process.main()
    sys.stderr.flush()
    os._exit(status)


def local_rank(command: Sequence[str], stdin: int, stdout: int, pass_fds: tuple[int]) -> Fork | subprocess.Popen[bytes]:
    """In place of the process that `LocalRanks` starts. A program other than this Python is started as it would be."""
    if command[0] != PYTHON:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, pass_fds=pass_fds)
    assert command[-1] == "dflash_backend.parallel.rank_process"
    (memory,) = pass_fds
    return Fork("run_local", os.getpid(), _Descriptor(stdin), _Descriptor(memory), memory)


def fork_ranks(patch: pytest.MonkeyPatch) -> None:
    """Ranks of this machine are forks from now on."""
    patch.setattr("dflash_backend.parallel.local.subprocess", SimpleNamespace(Popen=local_rank))


def run_remote(connection: Connection, node: str, engine_key: bytes) -> None:
    """A rank that is reached over the network, until its engine is gone."""
    process = RemoteRankProcess()
    connection.send(process.open(HOST, node, engine_key))
    try:
        process.run(connection.recv())
    finally:
        # As an actor of Ray, it outlives what it ran; the end of a fork would cut off its last message.
        time.sleep(LAST_WORDS_MS / 1000)


class ForkLauncher:
    """As `remote.Launcher`, in place of Ray: each rank a process of this machine."""

    host = HOST

    def __init__(self) -> None:
        self.processes: list[Fork] = []
        self.connections: list[Connection] = []

    def num_beside(self, rank: int) -> int:
        return 1

    def device_index(self, rank: int) -> int:
        return 0

    def open(self, num_ranks: int, engine_key: bytes) -> list[RankAddress]:
        for rank in range(1, num_ranks + 1):
            ours, theirs = _context.Pipe()
            with theirs:
                self.processes.append(Fork("run_remote", theirs, f"machine {rank}", engine_key))
            self.connections.append(ours)
        return [connection.recv() for connection in self.connections]

    def run(self, setups: Sequence[RemoteRank]) -> None:
        for connection, setup in zip(self.connections, setups, strict=True):
            connection.send(setup)

    def ended(self, rank: int) -> str:
        return "" if self.processes[rank - 1].poll() is None else "its process has ended"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def over_the_network(patch: pytest.MonkeyPatch) -> None:
    """Engines that ask for Ray get ranks over the network, in processes of this machine."""

    def ranks(size: int, on_gpus: bool = False) -> RemoteRanks:
        return RemoteRanks(Shard(0, size), ForkLauncher())

    patch.setattr("dflash_backend.parallel.group.ray_ranks", ranks)


def start_engine(models: dict[str, str], **settings: Any) -> tuple[Fork, list[int]]:
    """An engine in a process of its own, which has answered a request, and the processes of its ranks, which are
    reached over the network."""
    ours, theirs = _context.Pipe()
    with theirs:
        process = Fork("run_engine", theirs, models, settings, daemon=False)
    return process, ours.recv()


def run_engine(connection: Connection, models: dict[str, str], settings: dict[str, Any]) -> None:
    """In a fork, which makes its ranks of itself."""
    global _context
    from tests.worker.engines import engine, outputs_of

    _context = multiprocessing.get_context("fork")
    over_the_network(pytest.MonkeyPatch())
    built = engine(**models, **settings)
    outputs_of(built, [[5, 6, 7]], [{"temperature": 0.0, "max_tokens": 8}])
    connection.send([process.pid for process in multiprocessing.active_children()])
    time.sleep(600)


class PausedStep:
    """A message to a rank that takes it so long to read, while it holds the interpreter lock, as code that is compiled
    or a long operation without a break would."""

    def __init__(self, step: object, seconds: float) -> None:
        self.step, self.seconds = step, seconds

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, float]]:
        return _after_a_pause, (self.step, self.seconds)


def _after_a_pause(step: object, seconds: float) -> object:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # which does not release the lock
    return step
