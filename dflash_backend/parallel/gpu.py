"""Ranks on GPUs: messages whose tensors go from device to device, and graphs, memory and KV of each rank.

Of a step that is queued after another the host knows no token yet. So a message has the shapes of its tensors, and
these follow in one broadcast, in the order of the streams. What was captured in a graph is broadcast at each replay.

Rank 0 decides which graphs there are, when they are replayed, and how many KV blocks each rank has. Ranks are told in
the order of the passes, so collectives have one order on all, in graphs as outside of them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_backend.attention import AttentionBackend, KVLayer
from dflash_backend.heap import freeze_heap
from dflash_backend.models.peers import Peers, RankLostError
from dflash_backend.parallel.target import Follower
from dflash_backend.parallel.vocabulary import OtherRanks, Sums
from dflash_backend.worker.graphs import every_kernel, no_collection
from dflash_backend.worker.memory import CudaMemory, MemoryUse

ALIGNMENT = 64
"""Bytes between the beginnings of tensors in a broadcast."""
Spec = tuple[torch.dtype, tuple[int, ...]]


class Broadcast(Protocol):
    """As `GpuSum`."""

    def broadcast(self, x: torch.Tensor) -> None:
        """What rank 0 has in `x`, on all ranks."""


class DeviceMessages:
    """What rank 0 sends and the others receive, in the same order."""

    def __init__(self, group: Broadcast, device: torch.device) -> None:
        """device: of this rank's tensors that are broadcast. Others are sent as they are."""
        self._group = group
        self._device = device
        self._gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device)

    def send(self, message: object, send: Callable[[bytes], None]) -> int:
        """Give `message` to all ranks. send: what takes bytes to them. Returns how many there were, of one rank."""
        out = io.BytesIO()
        pickler = _Pickler(out, self._device)
        pickler.dump(message)
        tensors = [tensor.contiguous() for tensor in pickler.tensors]
        data = pickle.dumps(([_spec(tensor) for tensor in tensors], out.getvalue()))
        send(data)
        if tensors:
            self._group.broadcast(self._joined(tensors))
        return len(data)

    def received(self, data: bytes, before: Callable[[], None] = lambda: None) -> Any:
        """The message of these bytes. Its tensors are views of what was received. before: called ahead of a broadcast,
        if there is one."""
        specs, body = pickle.loads(data)
        tensors: list[torch.Tensor] = []
        if specs:
            before()
            sizes = [_num_bytes(spec) for spec in specs]
            buffer = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=self._device)
            self._group.broadcast(buffer)
            first = 0
            for (dtype, shape), size in zip(specs, sizes, strict=True):
                tensors.append(buffer[first : first + size].view(dtype).view(shape))
                first += _aligned(size)
        return _Unpickler(io.BytesIO(body), tensors).load()

    def _joined(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """All of them in one piece of memory, by one copy."""
        parts = []
        for tensor in tensors:
            parts += [tensor.view(-1).view(torch.uint8), self._gap[: _aligned(tensor.nbytes) - tensor.nbytes]]
        return torch.cat(parts)


def _spec(tensor: torch.Tensor) -> Spec:
    return tensor.dtype, tuple(tensor.shape)


def _num_bytes(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Tensors of a device by their number."""

    def __init__(self, out: io.BytesIO, device: torch.device) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._device_type = device.type
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or value.device.type != self._device_type:
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(body)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> torch.Tensor:
        return self._tensors[number]


@dataclass(frozen=True)
class BeginCapture:
    """What follows is captured and not run."""


@dataclass(frozen=True)
class EndCapture:
    """What was captured is kept as graph `number`; dropped where that is None."""

    number: int | None


@dataclass(frozen=True)
class Replay:
    """Run a graph."""

    number: int


@dataclass(frozen=True)
class Variants:
    """From now on passes run every kernel that they may need, or no longer."""

    every: bool


@dataclass(frozen=True)
class ReportFree:
    """Give the free bytes of the device."""


@dataclass(frozen=True)
class ReportUse:
    """Give what the memory goes to, and what the largest step since the weights were loaded took."""


@dataclass(frozen=True)
class AllocateKV:
    """Take a KV cache of this many blocks, in place of the one that there is."""

    num_blocks: int


Control = BeginCapture | EndCapture | Replay | Variants | ReportFree | ReportUse | AllocateKV
"""What rank 0 sends beside `parallel.target.RankMessage`."""


class Ranks(OtherRanks, Protocol):
    """num_sent: messages that were sent."""

    num_sent: int


class GpuPeers(Peers):
    """What rank 0 asks of ranks on GPUs."""

    def __init__(self, ranks: Ranks, sums: Sums, device: torch.device) -> None:
        self._ranks = ranks
        self._sums = sums
        self._device = device
        self._num_graphs = 0

    def check(self) -> None:
        if reason := self._ranks.lost:
            raise RankLostError(reason)

    @contextmanager
    def every_variant(self) -> Iterator[None]:
        self._send(Variants(True))
        try:
            yield
        finally:
            self._send(Variants(False))

    @contextmanager
    def capturing(self) -> Iterator[Callable[[], None]]:
        number, self._num_graphs = self._num_graphs, self._num_graphs + 1
        self._send(BeginCapture())
        before, kept = self._ranks.num_sent, [False]
        completed = False

        def replay() -> None:
            if kept[0]:
                self._send(Replay(number))

        try:
            yield replay
            completed = True
        finally:
            # Half of a step may need nothing of the others.
            kept[0] = completed and self._ranks.num_sent > before
            self._send(EndCapture(number if kept[0] else None))

    def least_free(self, num_bytes: int) -> int:
        return min(row[0] for row in self._reports(ReportFree(), [num_bytes]))

    def uses(self, own: MemoryUse) -> list[MemoryUse]:
        """What each rank's memory goes to, rank 0's first, `own`. What graphs take is taken to be as here: a step of
        the others needs less."""
        rows = self._reports(ReportUse(), [own.total, own.weights, own.others, own.step or 0])
        others = [MemoryUse(total, weights, rest, step, own.graphs) for total, weights, rest, step in rows[1:]]
        return [own, *others]

    def allocate(self, num_blocks: int) -> None:
        """Let the others take their KV caches."""
        self._send(AllocateKV(num_blocks))

    def _reports(self, question: Control, own: list[int]) -> list[list[int]]:
        """What each rank answers, rank 0's first."""
        self._send(question)
        rows = self._sums.gather(torch.tensor(own, dtype=torch.int64, device=self._device))
        found = [row.tolist() for row in rows]
        self.check()
        return found

    def _send(self, message: Control) -> None:
        try:
            self._ranks.send(message)
        except RuntimeError as error:
            raise RankLostError(f"{type(message).__name__} did not reach all ranks: {error}") from error


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
        probe: CudaMemory,
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
            self._variants.close()
            if message.every:
                self._variants.enter_context(every_kernel(self._backend))
        elif isinstance(message, ReportFree):
            self._report(self._probe.total() - self._probe.in_use())
        elif isinstance(message, ReportUse):
            step = self._probe.peak() - self._weights
            self._probe.release()
            others = max(self._probe.in_use() - self._weights, 0)
            self._report(self._probe.total(), self._weights, others, step)
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

    def _report(self, *numbers: int) -> None:
        self._sums.gather(torch.tensor(numbers, dtype=torch.int64, device=self._device))
