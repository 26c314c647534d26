"""Products of few rows by the fastest of cuBLASLt's ways, as measured before the first request.

Which way is fastest for a weight's shape and a number of rows is measured once, in the block `measuring`, where each
product meets the shapes that captured steps have. Outside it nothing is measured: what has no way of its own is
torch's `F.linear`, as is everything with a bias, of more rows, or of other dtypes. A number of rows keeps its way as
long as the process lives, so a product has the same bits each time; another process may choose otherwise, so ranks do
not measure.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from dflash_kernels.cublas_lt import (
    ALIGNMENT,
    DATA_TYPES,
    IN_FLOAT32,
    WORKSPACE_BYTES,
    Candidate,
    CublasLt,
    CublasLtError,
    Problem,
    loaded_library,
)

logger = logging.getLogger(__name__)

# Rows of captured steps, at most; ways that are tried for each number; and how often each is timed.
MAX_ROWS, CANDIDATES, REPEATS = 512, 8, 5
# A way is taken where it needs this part of `F.linear`'s time at most: a smaller gain is noise.
WORTH = 0.97
# All measuring together may take so long; what is met later is `F.linear`'s.
BUDGET_S = 5.0
# More than the largest cache of a GPU: weights are read from memory, as in a step.
COLD_BYTES = 256 << 20
# How far a way's numbers may be off, by the largest number.
TOLERANCE = 2e-2

Work = Callable[[], object]
Seconds = Callable[[Sequence[Sequence[Work]], int], list[float]]
"""The time of one piece of each of several works, whose pieces run one after the other; and how often each is run."""


@dataclass(frozen=True)
class Way:
    """How a product of one shape is computed."""

    problem: Problem
    candidate: Candidate


class _State:
    """wanted: whether this process measures. measuring: whether it may do so now."""

    wanted = False
    measuring = False
    products: MeasuredProducts | None = None


def use_measured_products(wanted: bool) -> None:
    """Say whether this process measures how its products are computed; to be called before models are made."""
    _State.wanted, _State.products = wanted, None


def wants_measured_products() -> bool:
    """What `use_measured_products` said last; false before."""
    return _State.wanted


@contextmanager
def measuring() -> Iterator[None]:
    """In this block products measure how they are computed, where that is wanted; the log says what came of it."""
    before, _State.measuring = _State.measuring, _State.wanted
    try:
        yield
    finally:
        _State.measuring = before
        if _State.wanted:
            logger.info("%s", describe_measured())


def describe_measured() -> str:
    """What measuring came to in this process."""
    return "no products were measured" if _State.products is None else _State.products.describe()


def product_of(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """What multiplies by a weight `[out, in]`: `F.linear` unless products are measured and the weight is one of a GPU
    in 16 bits."""
    if not _State.wanted or weight.device.type != "cuda" or weight.dtype not in DATA_TYPES:
        return F.linear
    if _State.products is None:
        try:
            _State.products = MeasuredProducts(CublasLt(loaded_library()))
        except (CublasLtError, OSError, AttributeError) as error:
            logger.warning("Products are torch's, their ways are not measured: %s", error)
            _State.wanted = False
            return F.linear
    _State.products.add(weight)
    return _State.products


class MeasuredProducts:
    """`__call__(x, weight, bias)` as `F.linear`, for weights that were added."""

    def __init__(self, lt: CublasLt, seconds: Seconds | None = None, clock: Callable[[], float] = time.monotonic):
        """seconds: the clock of works; by default a GPU's, by graphs. clock: of the host."""
        self._lt, self._clock = lt, clock
        self._seconds = seconds or graph_seconds
        self._weights: dict[tuple[tuple[int, ...], torch.dtype], list[weakref.ref[torch.Tensor]]] = {}
        self._ways: dict[tuple[tuple[int, ...], int, torch.dtype], Way | None] = {}
        self._workspaces: dict[int, torch.Tensor] = {}
        self._spent_s = 0.0

    def add(self, weight: torch.Tensor) -> None:
        """A weight that will be multiplied by. Those of a shape are read in turn while it is measured."""
        self._weights.setdefault((tuple(weight.shape), weight.dtype), []).append(weakref.ref(weight))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.numel() // weight.shape[1]
        if bias is None and 0 < rows <= MAX_ROWS and x.dtype == weight.dtype and fits(x) and fits(weight):
            key = (tuple(weight.shape), rows, x.dtype)
            if key not in self._ways and _State.measuring and not _is_capturing(x.device):
                self._ways[key] = self._measured(rows, weight)
            way = self._ways.get(key)
            if way is not None:
                out = x.new_empty(*x.shape[:-1], len(weight))
                try:
                    self._multiply(way, x, weight, out)
                    return out
                except CublasLtError as error:
                    self._ways[key] = None
                    logger.warning(
                        "Products of %d rows by %s are torch's from here on: %s", rows, list(weight.shape), error
                    )
        return F.linear(x, weight, bias)

    def describe(self) -> str:
        """How many products were measured, and of how many the way was changed."""
        chosen = sum(way is not None for way in self._ways.values())
        return (
            f"of {len(self._ways)} products by shape and rows {chosen} take another way than cuBLAS's first choice; "
            f"measuring took {self._spent_s:.1f} s"
        )

    def _multiply(self, way: Way, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.device.type == "cuda" else 0
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        way.problem.multiply(way.candidate, x, weight, out, self._workspaces[stream], stream)

    def _measured(self, rows: int, weight: torch.Tensor) -> Way | None:
        """The way for this many rows; None for `F.linear`."""
        if self._spent_s >= BUDGET_S:
            return None
        started = self._clock()
        try:
            return self._fastest(rows, weight)
        except (CublasLtError, RuntimeError) as error:  # among these is that memory does not suffice
            reason = str(error).partition("\n")[0]
            logger.warning("Products of %d rows by %s are torch's: %s", rows, list(weight.shape), reason)
            return None
        finally:
            self._spent_s += self._clock() - started

    def _fastest(self, rows: int, weight: torch.Tensor) -> Way | None:
        (outputs, inputs), device = weight.shape, weight.device
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(rows, inputs, device=device, generator=generator, dtype=weight.dtype)
        out, expected = x.new_empty(rows, outputs), F.linear(x, weight)
        problem = self._lt.problem(outputs, inputs, rows, weight.dtype)
        # Sums whose parts are rounded to 16 bits are torch's default; none of ours are.
        ways = [Way(problem, each) for each in problem.candidates(CANDIDATES, IN_FLOAT32)]
        ways = [way for way in ways if self._is_right(way, x, weight, out, expected)]
        if not ways:
            return None
        weights = self._cold(weight)
        works: list[list[Work]] = [[partial(F.linear, x, each) for each in weights]]
        works += [[partial(self._multiply, way, x, each, out) for each in weights] for way in ways]
        torchs, *ours = self._seconds(works, REPEATS)
        fastest = min(range(len(ways)), key=lambda number: ours[number])
        return ways[fastest] if ours[fastest] <= WORTH * torchs else None

    def _is_right(
        self, way: Way, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, expected: torch.Tensor
    ) -> bool:
        try:
            self._multiply(way, x, weight, out.fill_(float("nan")))
        except CublasLtError:
            return False
        error = (out.float() - expected.float()).abs().amax() / expected.float().abs().amax()
        return float(error) <= TOLERANCE

    def _cold(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Weights like this one, as many as no cache holds together, or as there are."""
        found, size = [weight], weight.numel() * weight.itemsize
        for reference in self._weights.get((tuple(weight.shape), weight.dtype), ()):
            other = reference()
            if len(found) * size >= COLD_BYTES:
                break
            if other is not None and other is not weight:
                found.append(other)
        return found


def fits(tensor: torch.Tensor) -> bool:
    """Whether the library takes a tensor as it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def graph_seconds(works: Sequence[Sequence[Work]], repeats: int) -> list[float]:
    """Each work as a CUDA graph on a stream of its own, so that the host's launches cost nothing; the median, in turn,
    so that a clock that changes meets all of them."""
    torch.cuda.synchronize()
    stream, graphs = measuring_stream(torch.cuda.current_device()), []
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for _ in works]
    with torch.cuda.stream(stream):
        for pieces in works:
            for piece in pieces[:2]:
                piece()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for piece in pieces:
                    piece()
            finally:
                graph.capture_end()
            graphs.append(graph)
        for turn in range(-1, repeats):
            for number, graph in enumerate(graphs):
                if turn < 0:
                    graph.replay()
                    continue
                start, end = events[number][turn]
                start.record()
                graph.replay()
                end.record()
        stream.synchronize()
    times = [[start.elapsed_time(end) for start, end in turns] for turns in events]
    return [statistics.median(each) / 1e3 / len(pieces) for each, pieces in zip(times, works, strict=True)]


_streams: dict[int, torch.cuda.Stream] = {}


def measuring_stream(device: int) -> torch.cuda.Stream:
    """The stream of all measuring: libraries keep memory for each that they have seen."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
