"""The process of a rank other than 0: it runs the layers of the target, its part of them, on what rank 0 sends.

Its standard input is the socket to rank 0. It ends with rank 0, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.engine.rank_messages import Beat, RankReady, RankSetup
from dflash_backend.engine.ranks import BEAT_S
from dflash_backend.engine.sums import SharedSum
from dflash_backend.models.ops import select_ops
from dflash_backend.models.parallel import Follower, load_shard
from dflash_backend.models.recurrent_state import StatePool
from dflash_backend.process_watch import WatchedProcess
from dflash_backend.worker.kv_cache import PagedKVCache

_log = logging.getLogger(__name__)

STDIN = 0


def run(connection: Connection, setup: RankSetup) -> None:
    """Load this rank's part, then run passes until rank 0 is gone."""
    torch.set_num_threads(setup.num_threads)
    device = torch.device("cpu")
    reduce = SharedSum(setup.memory, setup.shard)
    lock = threading.Lock()

    def send(message: object) -> None:
        with lock:
            connection.send_bytes(pickle.dumps(message))

    threading.Thread(target=_beat, args=(send,), name="beat", daemon=True).start()
    try:
        target = load_shard(
            setup.spec,
            setup.shard,
            reduce,
            setup.max_positions,
            setup.dtype,
            device,
            ops=select_ops(device, None, setup.batch_invariant),
            fp8=setup.fp8,
        )
        decoder = target.spec.decoder
        kv = PagedKVCache.allocate(
            decoder, None, setup.num_blocks, setup.block_size, setup.dtype, device, setup.kv_dtype
        )
        pool = None
        if decoder.delta_net is not None:
            pool = StatePool.allocate(decoder, setup.num_states, setup.dtype, device)
    except (CheckpointError, RuntimeError, MemoryError) as error:
        send(RankReady(str(error) or type(error).__name__))
        return
    send(RankReady())
    backend: AttentionBackend = TorchBackend(setup.block_size)
    if setup.batch_invariant:
        backend = backend.batch_invariant()
    follower = Follower(target, kv.target, backend, setup.dtype, pool)
    with torch.inference_mode():
        while True:
            follower.run(pickle.loads(connection.recv_bytes()))


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
    """A rank, as `RankGroup` starts it. The exit status is 1 unless rank 0 has ended it."""
    # A Ctrl-C in a terminal reaches it as well, and rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(os.dup(STDIN))
    setup: RankSetup = pickle.loads(connection.recv_bytes())
    form = f"dflash: rank {setup.shard.rank}: %(name)s: %(message)s"
    logging.basicConfig(level=setup.log_level.upper(), format=form)
    watched = WatchedProcess(setup.parent)
    if os.getppid() != setup.parent:
        return 1
    threading.Thread(target=_end_with, args=(watched,), name="parent-watch", daemon=True).start()
    try:
        run(connection, setup)
    except EOFError:
        return 0
    except Exception:  # noqa: BLE001, the process's last words
        _log.exception("rank %d stopped", setup.shard.rank)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
