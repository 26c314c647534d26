"""A rank on a GPU other than rank 0: it runs passes, captures and replays graphs of them, and takes its KV, all as rank
0 says (`gpu_peers.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.heap import freeze_heap
from dflash_backend.models.vocabulary import Sums
from dflash_backend.parallel.device_messages import DeviceMessages
from dflash_backend.parallel.gpu_peers import (
    AllocateKV,
    BeginCapture,
    Control,
    EndCapture,
    Replay,
    ReportFree,
    ReportUse,
    Variants,
)
from dflash_backend.parallel.target import Follower
from dflash_backend.worker.graphs import every_kernel, no_collection
from dflash_backend.worker.memory import MemoryProbe


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None: ...


Capture = Callable[[], AbstractContextManager[Graph]]
"""What is queued in the block is captured in the graph that it gives."""


class CudaCapture:
    """As `Capture`, on the current GPU. All graphs have their memory in one pool: they run one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        freeze_heap()  # or each capture looks through all of it

    @contextmanager
    def __call__(self) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            yield graph


class GpuFollower:
    """Runs what rank 0 sends. Its weights are loaded, and nothing has run."""

    def __init__(
        self,
        follower: Follower,
        backend: AttentionBackend,
        messages: DeviceMessages,
        sums: Sums,
        probe: MemoryProbe,
        capture: Capture,
        allocate: Callable[[int], list[KVLayer]],
        device: torch.device,
    ) -> None:
        """backend: the follower's. allocate: makes KV of a number of blocks."""
        self._follower = follower
        self._backend = backend
        self._messages = messages
        self._sums = sums
        self._probe = probe
        self._capture = capture
        self._allocate = allocate
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self._capturing = False
        self._block = ExitStack()
        self._graph: Graph | None = None
        self._variants = ExitStack()
        probe.release()
        self._weights = probe.allocated()
        probe.reset_peak()

    def run(self, data: bytes) -> None:
        """Do what a message says."""
        message = self._messages.received(data, self._begin_capture)
        if isinstance(message, Control):
            self._control(message)
        else:
            self._begin_capture()
            self._follower.run(message)

    def _control(self, message: Control) -> None:
        if isinstance(message, Replay):
            self._graphs[message.number].replay()
        elif isinstance(message, BeginCapture):
            self._capturing = True
        elif isinstance(message, EndCapture):
            self._end_capture(message.number)
        elif isinstance(message, Variants):
            self._set_variants(message.every)
        elif isinstance(message, ReportFree):
            self._report(self._probe.total() - self._probe.in_use())
        elif isinstance(message, ReportUse):
            self._report_use()
        else:
            assert isinstance(message, AllocateKV)
            self._follower.take_kv([])  # its memory is needed
            self._follower.take_kv(self._allocate(message.num_blocks))

    def _begin_capture(self) -> None:
        """Before the first work of a capture, which may have none."""
        if self._capturing and self._graph is None:
            self._graph = self._block.enter_context(self._capture())

    def _end_capture(self, number: int | None) -> None:
        graph, self._graph, self._capturing = self._graph, None, False
        self._block.close()
        if number is not None:
            assert graph is not None
            self._graphs[number] = graph

    def _set_variants(self, every: bool) -> None:
        self._variants.close()
        if every:
            self._variants.enter_context(every_kernel(self._backend))

    def _report_use(self) -> None:
        step = self._probe.peak() - self._weights
        self._probe.release()
        others = max(self._probe.in_use() - self._weights, 0)
        self._report(self._probe.total(), self._weights, others, step)

    def _report(self, *numbers: int) -> None:
        self._sums.gather(torch.tensor(numbers, dtype=torch.int64, device=self._device))
