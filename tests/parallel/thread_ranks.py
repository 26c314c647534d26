"""Ranks as those on GPUs, in threads of this process and on the CPU: the same messages, broadcasts and graphs.

A graph is emulated: in its block the work is run, and a replay runs it again, with what is broadcast then. Each rank's
exchanges are kept in their order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_backend.checkpoints import TargetSpec
from dflash_backend.config import EngineConfig
from dflash_backend.core.engine import EngineCore
from dflash_backend.engine.build import BuiltEngine
from dflash_backend.parallel import group, rank
from dflash_backend.parallel.gpu import GpuFollower
from dflash_backend.parallel.group import GpuRanks, RankGroup, vocabulary_bytes
from dflash_backend.parallel.links import RankReady, RankSetup, StartFailure, call_together
from dflash_backend.parallel.nccl import GpuSum
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.target import TensorParallelTarget
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.step import SpecDecodeModel
from tests.worker.engines import device_runner

CPU = torch.device("cpu")
TIMEOUT_S = 20.0
GIB = 1 << 30


class Exchange:
    """What threads give each other; all come before one goes on. log: of each rank its exchanges, as kind and bytes."""

    def __init__(self, size: int) -> None:
        self.log: list[list[tuple[str, int]]] = [[] for _ in range(size)]
        self._given: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def all_of(self, own: int, kind: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.log[own].append((kind, x.nbytes))
        self._given[own] = x.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def end(self) -> None:
        self._barrier.abort()


class ThreadCollectives:
    """As `nccl.Communicator`."""

    def __init__(self, exchange: Exchange, own: int) -> None:
        self._exchange, self._own = exchange, own

    def sum(self, x: torch.Tensor) -> None:
        first, *others = self._exchange.all_of(self._own, "sum", x)
        x.copy_(sum(others, start=first))

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._exchange.all_of(self._own, "broadcast", x)[0])

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.stack(self._exchange.all_of(self._own, "gather", x)).view_as(out))

    def abort(self) -> None:
        self._exchange.end()


class Memory:
    """As `CudaMemory`, of a device that holds only what is said here."""

    def __init__(self, weights: int = 0, step: int = 0, total: int = 8 * GIB) -> None:
        self.numbers = {"weights": weights, "step": step, "total": total}

    def total(self) -> int:
        return self.numbers["total"]

    def in_use(self) -> int:
        return self.numbers["weights"]

    def allocated(self) -> int:
        return self.numbers["weights"]

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return self.numbers["weights"] + self.numbers["step"]

    def release(self) -> None: ...


class Recorded:
    """As `gpu.Graph`."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.run: Callable[[bytes], None] = lambda data: None

    def replay(self) -> None:
        for data in self.messages:
            self.run(data)


@contextmanager
def recorded() -> Iterator[Recorded]:
    """As `gpu.Capture`."""
    yield Recorded()


class RecordingFollower(GpuFollower):
    """Keeps the messages of a block that is captured."""

    def run(self, data: bytes) -> None:
        super().run(data)
        if isinstance(graph := self._graph, Recorded):
            graph.run = super().run
            graph.messages.append(data)


class ThreadLinks:
    """As `RankLinks`."""

    def __init__(self, size: int) -> None:
        self.lost = ""
        self.exchange = Exchange(size)
        self.sums = [
            GpuSum(Shard(own, size), CPU, lambda own=own: ThreadCollectives(self.exchange, own))  # type: ignore[misc]
            for own in range(size)
        ]
        self.reduce = self.sums[0]
        self.setups: list[RankSetup] = []
        self._passes: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(1, size)]
        self._answers: list[queue.Queue[object]] = [queue.Queue() for _ in range(1, size)]

    def start(self, setups: Sequence[RankSetup]) -> None:
        self.setups = list(setups)
        for setup in setups:
            threading.Thread(target=self._run, args=(setup,), daemon=True).start()

    def _run(self, setup: RankSetup) -> None:
        own = setup.shard.rank
        sums = self.sums[own]
        try:
            rank.run(setup, _ThreadRankZero(self._passes[own - 1], self._answers[own - 1]), sums, sums.join)
        except (EOFError, threading.BrokenBarrierError):
            return

    def sum_by(self, gpu_sum: GpuSum) -> None: ...

    def num_beside(self, rank: int) -> int:
        return 1

    def device_index(self, rank: int) -> int:
        return rank

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def start_failure(self) -> StartFailure | None:
        for number, answers in enumerate(self._answers, 1):
            while not isinstance(message := answers.get(timeout=TIMEOUT_S), RankReady):
                pass
            if message.error:
                return StartFailure(number, message.error)
        return None

    def serve(self) -> None:
        call_together(self)
        self.reduce.join(lambda: self.lost)

    def send(self, data: bytes) -> None:
        for passes in self._passes:
            passes.put(data)

    def end(self) -> None:
        self.lost = self.lost or "the engine has ended"
        self.exchange.end()
        for passes in self._passes:
            passes.put(None)


class _ThreadRankZero:
    def __init__(self, passes: queue.Queue[bytes | None], answers: queue.Queue[object]) -> None:
        self._passes, self._answers = passes, answers

    def send(self, message: object) -> None:
        self._answers.put(message)

    def receive(self) -> bytes:
        data = self._passes.get()
        if data is None:
            raise EOFError
        return data


def as_on_gpus(patch: pytest.MonkeyPatch, memory: Callable[[], Memory] = Memory) -> None:
    """Ranks are threads that do as those on GPUs from now on. memory: makes that of a rank other than 0."""

    def of(
        config: EngineConfig, spec: TargetSpec, weight_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> RankGroup:
        size = config.tensor_parallel_size
        splits_vocabulary = vocabulary_bytes(spec, dtype) >= group.MIN_SPLIT_BYTES
        links = ThreadLinks(size)
        return RankGroup(links, size, weight_bytes, splits_vocabulary, GpuRanks(CPU, links.sums[0], b""))

    patch.setattr(RankGroup, "of", of)
    patch.setattr(rank, "GpuFollower", RecordingFollower)
    patch.setattr(rank, "CudaMemory", lambda device: memory())
    patch.setattr(rank, "CudaCapture", lambda: recorded)
    patch.setattr(rank, "_beat", lambda send: None)


def thread_links(built: BuiltEngine) -> ThreadLinks:
    target = built.runner.model.target
    assert isinstance(target, TensorParallelTarget)
    assert isinstance(target.ranks, RankGroup)
    assert isinstance(target.ranks.links, ThreadLinks)
    return target.ranks.links


class EmulatedGraphs:
    """As `CudaGraphRunner`: after one run its parts are captured, and from then on the others run on replays alone."""

    def __init__(self, model: SpecDecodeModel, inputs: ForwardBatch, links: ThreadLinks) -> None:
        self._model, self._links = model, links
        model.run(replace(inputs))
        step, peers = replace(inputs), model.target.peers
        with peers.capturing() as verified_there:
            model.verify(step)
        with peers.capturing() as accepted_there:
            model.accept(step)
        with peers.capturing() as drafted_there:
            model.draft(step)
        self._there = verified_there, accepted_there, drafted_there

    def verify(self, step: ForwardBatch, *_: object) -> ForwardBatch:
        with self._replaying(0):
            return self._model.verify(step)

    def accept(self, step: ForwardBatch) -> None:
        with self._replaying(1):
            self._model.accept(step)

    def draft(self, step: ForwardBatch, *_: object) -> None:
        with self._replaying(2):
            self._model.draft(step)

    @contextmanager
    def _replaying(self, part: int) -> Iterator[None]:
        """The exchanges of a graph, without a message to anyone."""
        self._there[part]()
        send, self._links.send = self._links.send, lambda data: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._links.send = send  # type: ignore[method-assign]


def with_graphs(built: BuiltEngine, overlap: bool = True, **options: Any) -> BuiltEngine:
    """The same engine with the steps of a GPU, decode steps in emulated graphs. `built` must not be used any more."""
    runner, links = device_runner(built, padded=False, **options), thread_links(built)

    def make(inputs: ForwardBatch) -> EmulatedGraphs:
        runner.layouts.send_nothing(inputs.num_rows, inputs.num_tokens)
        return EmulatedGraphs(runner.model, inputs, links)

    with torch.inference_mode():
        runner.graphs.make(make, [1, 2], sampled=True, progress=lambda message, fraction: None)
    core = EngineCore(built.core.config, runner, overlap=overlap, grammars=built.grammars)
    return replace(built, core=core, runner=runner)
