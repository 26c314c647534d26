"""The process of a rank other than 0: it runs the layers of the target, its part of them, on what rank 0 sends.

As a process of rank 0's machine its standard input is the socket to rank 0. It ends with rank 0, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from dflash_backend.attention import BackendError, KVLayer, select_backend
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError
from dflash_backend.device import num_rank_threads, prepare_gpu
from dflash_backend.heap import keep_step_buffers
from dflash_backend.models.ops import select_ops
from dflash_backend.models.recurrent_state import StatePool
from dflash_backend.parallel.alike import check_files, check_kernels, kernels_of
from dflash_backend.parallel.gpu import CudaCapture, DeviceMessages, GpuFollower
from dflash_backend.parallel.links import BEAT_S, CAUSE_S, Beat, LocalRank, RankFailed, RankReady, RankSetup
from dflash_backend.parallel.nccl import GpuSum, load_nccl
from dflash_backend.parallel.sums import SharedSum
from dflash_backend.parallel.target import Follower, load_shard, vocabulary_part
from dflash_backend.parallel.vocabulary import Sums
from dflash_backend.process_watch import WatchedProcess
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.memory import CudaMemory

_log = logging.getLogger(__name__)

STDIN = 0
# How long a rank that has failed waits to be ended: another one may be the cause, and its end must show first.
FAILED_S = 2 * CAUSE_S


class RankZero(Protocol):
    """What a rank has of rank 0. Any thread may send."""

    def send(self, message: object) -> None:
        """Raises `OSError` when rank 0 has gone."""

    def receive(self) -> bytes:
        """The next message. Raises `EOFError` when rank 0 has gone."""


class _LocalRankZero:
    """Rank 0 on this machine."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps(message))

    def receive(self) -> bytes:
        return self._connection.recv_bytes()


def run(
    setup: RankSetup,
    rank_zero: RankZero,
    sums: Sums,
    join: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Load this rank's part, then run passes until rank 0 is gone; `EOFError` says so. join: meet the other ranks, once
    rank 0 says that all have loaded. check: raises what keeps this rank from loading. Any other error is told to rank 0
    and goes on."""
    keep_step_buffers()
    threading.Thread(target=_beat, args=(rank_zero.send,), name="beat", daemon=True).start()
    try:
        if setup.device.type == "cuda":  # before anything is allocated, which would be on the first GPU
            torch.cuda.set_device(setup.device)
        torch.set_num_threads(num_rank_threads(setup.weight_bytes, setup.num_sharers))
        check()
        run_message = _load(setup, sums)
    except Exception as error:  # noqa: BLE001, rank 0 raises it
        rank_zero.send(_not_ready(error))
        return
    rank_zero.send(RankReady())
    try:
        rank_zero.receive()  # `Join`
        join()
        with torch.inference_mode():
            while True:
                run_message(rank_zero.receive())
    except EOFError:
        raise
    except Exception as error:
        _log.exception("rank %d stops", setup.shard.rank)
        time.sleep(FAILED_S)
        rank_zero.send(RankFailed(f"{type(error).__name__}: {error}"))
        raise


def start(
    setup: RankSetup, rank_zero: RankZero, on_cpus: Callable[[], Sums], join: Callable[[], None] = lambda: None
) -> None:
    """As `run`, with sums of its own; `on_cpus` and `join` are of ranks on CPUs."""
    try:
        sums, join_on_gpus = sums_of(setup, on_cpus)
    except Exception as error:  # noqa: BLE001, rank 0 raises it
        rank_zero.send(_not_ready(error))
        return
    run(setup, rank_zero, sums, join_on_gpus or join, lambda: _check(setup))


def _check(setup: RankSetup) -> None:
    """Raises `ConfigError` where this rank would not compute what rank 0 does; and `CheckpointError`."""
    if setup.files is not None:
        check_files(setup.files, setup.spec.path)
    if setup.kernels:
        attention = select_backend(setup.attention, setup.needs, setup.block_size).name
        check_kernels(setup.kernels, kernels_of(setup.device, attention))


def _not_ready(error: Exception) -> RankReady:
    """What rank 0 is told of a rank that cannot start; the log has more where the error is not for an operator."""
    if not isinstance(error, (CheckpointError, BackendError, ConfigError)):
        _log.error("this rank cannot start", exc_info=error)
        if not isinstance(error, (RuntimeError, MemoryError, OSError)):
            return RankReady(f"{type(error).__name__}: {error}")
    return RankReady(str(error) or type(error).__name__)


def sums_of(setup: RankSetup, on_cpus: Callable[[], Sums]) -> tuple[Sums, Callable[[], None] | None]:
    """The sum over ranks, and on GPUs what joins them. on_cpus: makes that of ranks on CPUs. Raises `ConfigError`."""
    if setup.device.type != "cuda":
        return on_cpus(), None
    sums = GpuSum.by_nccl(setup.shard, setup.device, load_nccl(), setup.nccl_id, setup.needs.batch_invariant)
    return sums, sums.join


def _load(setup: RankSetup, sums: Sums) -> Callable[[bytes], None]:
    """What runs a message of rank 0."""
    device, needs = setup.device, setup.needs
    if device.type == "cuda":
        prepare_gpu()
    backend = select_backend(setup.attention, needs, setup.block_size)
    wanted_ops = "triton" if backend.name == "triton" else None
    if needs.batch_invariant:
        backend = backend.batch_invariant()
    target = load_shard(
        setup.spec,
        setup.shard,
        sums,
        setup.max_positions,
        needs.dtype,
        device,
        ops=select_ops(device, wanted_ops, needs.batch_invariant),
        fp8=setup.fp8,
    )
    decoder = target.spec.decoder

    def allocate(num_blocks: int) -> list[KVLayer]:
        size = setup.block_size
        kv = PagedKVCache.allocate(decoder, None, num_blocks, size, needs.dtype, device, needs.kv_dtype)
        kv.claim()  # a server must not find too little memory while it serves
        return kv.target

    pool = None
    if decoder.delta_net is not None:
        pool = StatePool.allocate(decoder, setup.num_states, needs.dtype, device)
    vocabulary = vocabulary_part(target, setup.spec, setup.shard, sums)
    follower = Follower(target, allocate(setup.num_blocks), backend, needs.dtype, pool, vocabulary)
    if not isinstance(sums, GpuSum):
        return lambda data: follower.run(pickle.loads(data))
    messages = DeviceMessages(sums, device)
    return GpuFollower(follower, backend, messages, sums, CudaMemory(device), CudaCapture(), allocate, device).run


def log_to_stderr(setup: RankSetup) -> None:
    """Log lines of this process, with its rank."""
    form = f"dflash: rank {setup.shard.rank}: %(name)s: %(message)s"
    logging.basicConfig(level=setup.log_level.upper(), format=form)


def _beat(send: Callable[[object], None]) -> None:
    while True:
        time.sleep(BEAT_S)
        try:
            send(Beat())
        except OSError:
            os._exit(1)


def _end_with(parent: WatchedProcess) -> None:
    parent.wait()
    os._exit(1)


def main() -> int:
    """A rank, as `LocalRanks` starts it. The exit status is 1 unless rank 0 has ended it."""
    connection = Connection(os.dup(STDIN))
    local: LocalRank = pickle.loads(connection.recv_bytes())
    log_to_stderr(local.setup)
    watched = WatchedProcess(local.parent)
    if os.getppid() != local.parent:
        return 1
    threading.Thread(target=_end_with, args=(watched,), name="parent-watch", daemon=True).start()
    rank_zero = _LocalRankZero(connection)
    try:
        start(local.setup, rank_zero, lambda: SharedSum(local.memory, local.setup.shard))
    except EOFError:
        return 0
    except Exception:  # noqa: BLE001, it was logged, and told to rank 0
        return 1
    return 1
