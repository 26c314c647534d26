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

# Rows of captured steps, at most. Measured for up to 512 rows, cycles of 1 stream with 15 drafts took 0.97 of their
# time with torch's products on an H200, of 5, 8, 9, 17, 32 and 33 streams 1.00 to 1.02.
MAX_ROWS = 32
# Ways that the library is asked for. Of the first ones the sum is tried in other numbers of parts, too.
CANDIDATES, SPLIT_OF, SPLITS = 8, 2, (1, 2, 3, 4)
# How often each way is timed at first; how many are then timed beside torch's product, and how often.
ROUGH, FINALISTS, FINE = 2, 3, 5
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
    """How a product of one shape is computed. split: its sum is in other parts than the library proposed."""

    problem: Problem
    candidate: Candidate
    split: bool = False


class _State:
    """wanted: whether this process measures. measuring: whether it may do so now."""

    wanted = False
    measuring = False
    products: MeasuredProducts | None = None


def use_measured_products(wanted: bool) -> None:
    """Say whether this process measures how its products are computed; to be called before models are made."""
    _State.wanted, _State.products = wanted, None


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
        self._spent_s, self._late = 0.0, 0
        # By rows: seconds of torch's products, and as they are computed now.
        self._times: dict[int, tuple[float, float]] = {}

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
        """How many products were measured, of how many the way was changed, and what that gives."""
        chosen = [way for way in self._ways.values() if way is not None]
        text = (
            f"of {len(self._ways) - self._late} products by shape and rows {len(chosen)} take another way than "
            f"cuBLAS's first choice, {sum(way.split for way in chosen)} of them with the sum in other parts than it "
            "proposes; "
        )
        if self._times:
            before, now = (1e6 * sum(each) for each in zip(*self._times.values(), strict=True))
            rows = max(self._times, key=lambda rows: self._times[rows][0] / self._times[rows][1])
            most = "{:.1f} us in place of {:.1f}".format(*(1e6 * each for each in reversed(self._times[rows])))
            text += f"one of each takes {now:.1f} us in place of {before:.1f}, those of {rows} rows {most}; "
        late = f", and {self._late} were met after the {BUDGET_S:.0f} s for it" if self._late else ""
        return f"{text}measuring took {self._spent_s:.1f} s{late}"

    def _multiply(self, way: Way, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.device.type == "cuda" else 0
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        way.problem.multiply(way.candidate, x, weight, out, self._workspaces[stream], stream)

    def _measured(self, rows: int, weight: torch.Tensor) -> Way | None:
        """The way for this many rows; None for `F.linear`."""
        if self._spent_s >= BUDGET_S:
            self._late += 1
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
        problem = Problem(self._lt, outputs, inputs, rows, weight.dtype)
        ways = [way for way in ways_of(problem) if self._is_right(way, x, weight, out, expected)]
        if not ways:
            return None
        weights = self._cold(weight)
        linear: list[Work] = [partial(F.linear, x, each) for each in weights]
        works: list[list[Work]] = [[partial(self._multiply, way, x, each, out) for each in weights] for way in ways]
        rough = self._seconds(works, ROUGH)
        finalists = sorted(range(len(ways)), key=lambda number: rough[number])[:FINALISTS]
        torchs, *fine = self._seconds([linear, *(works[number] for number in finalists)], FINE)
        ours, fastest = min(zip(fine, finalists, strict=True))
        way, now = (ways[fastest], ours) if ours <= WORTH * torchs else (None, torchs)
        before = self._times.get(rows, (0.0, 0.0))
        self._times[rows] = before[0] + torchs, before[1] + now
        return way

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


def ways_of(problem: Problem) -> list[Way]:
    """The ways that are tried, the library's first choice first: `CANDIDATES` that it proposes; where one of these
    splits its sum, also the first `SPLIT_OF` with their sums in each of `SPLITS` parts."""
    # Sums whose parts are rounded to 16 bits are torch's default; none of ours are.
    proposed = problem.candidates(CANDIDATES, IN_FLOAT32)
    ways = {bytes(each.algo): Way(problem, each) for each in proposed}
    if any(each.config["split"] > 1 for each in proposed):
        for each in proposed[:SPLIT_OF]:
            for other in problem.splits(each, SPLITS):
                ways.setdefault(bytes(other.algo), Way(problem, other, split=True))
    return list(ways.values())


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
