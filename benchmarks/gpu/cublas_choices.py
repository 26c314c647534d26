"""What cuBLASLt proposes for a layer's products beside its first choice, which torch takes: how long each takes, by
number of rows.

A part of `card_report` that runs on request (`--only products`). Every proposal, and the first ones with their sums in
other numbers of parts, is timed over as many weights as no cache holds; the fastest few are timed again beside
`F.linear` and the first, and that is what is reported. `F.linear` alone is timed at more numbers of rows, which shows
where a step is worth padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.floor import Ceilings, Work, matrix
from benchmarks.gpu.results import KernelRun
from benchmarks.gpu.timing import num_copies, scale, seconds_each
from dflash_kernels.cublas_lt import (
    IN_FLOAT32,
    NO_REDUCTION,
    WORKSPACE_BYTES,
    Candidate,
    CublasLt,
    CublasLtError,
    Problem,
    loaded_library,
)
from dflash_kernels.measured_linear import TOLERANCE, graph_seconds

SECTION = "cuBLAS's choices"
LAYER = "a layer"
# Rows at which all proposals are timed, and those at which `F.linear` is besides.
TRIED = {"cuda": (1, 8, 16, 32, 64, 128, 144, 160, 192, 256, 272, 288, 320, 384, 448, 512), "cpu": (1, 4)}
TIMED = {"cuda": tuple(range(16, 529, 16)), "cpu": (4, 8)}
PROPOSALS, SPLIT_OF, SPLITS = 40, 4, (1, 2, 3, 4, 6, 8)
# Those that are timed again, and how often each is timed at first and then.
FINALISTS, ROUGH, FINE = 3, 3, 15
# A number of rows that costs less than this more is no step.
STEP = 1.02


def library() -> CublasLt | str:
    """cuBLASLt for the current device, or why it is not there."""
    try:
        return CublasLt(loaded_library())
    except (CublasLtError, OSError, AttributeError) as error:
        return str(error)


def measure(
    products: Sequence[tuple[str, int, int]], device: torch.device, dtype: torch.dtype, ceilings: Ceilings,
    lt: CublasLt | None,
) -> Iterator[KernelRun]:  # fmt: skip
    """Each product (name, outputs, inputs) at each number of rows, and last the sum of those that a layer has, of which
    the head is none. Without `lt` `F.linear` alone."""
    tried = TRIED[scale(device)]
    layer: dict[int, list[KernelRun]] = {}
    for name, outputs, inputs in products:
        copies = num_copies(device, dtype.itemsize * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
        for rows in sorted({*tried, *TIMED[scale(device)]}):
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            if lt is not None and rows in tried:
                seconds, others = Choices(lt, x, weights).measure()
            else:
                seconds, others = seconds_each(device, [partial(F.linear, x, weight) for weight in weights]), {}
            work = matrix(inputs, outputs, rows, dtype.itemsize) + Work(dtype.itemsize * rows * (inputs + outputs))
            run = KernelRun(SECTION, f"{name}, {rows} rows", seconds, work.seconds(ceilings), others)
            yield run
            if name != "head":
                layer.setdefault(rows, []).append(run)
        del weights
    for rows, runs in sorted(layer.items()):
        fastest = {"best of each": sum(min([run.seconds, *run.others.values()]) for run in runs)}
        yield KernelRun(
            SECTION, f"{LAYER}, {rows} rows", sum(run.seconds for run in runs), sum(run.floor_s for run in runs),
            fastest if all(run.others for run in runs) else {},
        )  # fmt: skip


def steps_in(runs: Sequence[KernelRun], what: str = LAYER) -> str:
    """The numbers of rows after which the next number that was timed costs `STEP` more, with the times in microseconds:
    fewer rows are worth padding to these."""
    times = [(int(run.name.split()[-2]), run.seconds) for run in runs if run.name.startswith(f"{what},")]
    following = [*(seconds for _, seconds in times[1:]), float("inf")]
    found = [each for each, after in zip(times, following, strict=True) if after > STEP * each[1]]
    return ", ".join(f"{rows} ({1e6 * seconds:.1f})" for rows, seconds in found)


class Choices:
    """The ways to multiply x `[rows, in]` by weights that are alike."""

    def __init__(self, lt: CublasLt, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
        self._x, self._weights = x, weights
        self._problem = Problem(lt, len(weights[0]), x.shape[1], len(x), x.dtype)
        self._out = x.new_empty(len(x), len(weights[0]))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)

    def measure(self) -> tuple[float, dict[str, float]]:
        """Seconds of `F.linear`; then of the first choice and of the best, with their attributes, and of the best whose
        sums stay in float32 where that is another."""
        ways = [way for way in self._all() if self._is_right(way)]
        linear = [partial(F.linear, self._x, weight) for weight in self._weights]
        if not ways:
            return graph_seconds([linear], FINE)[0], {}
        rough = graph_seconds([self._works(way) for way in ways], ROUGH)
        order = sorted(range(len(ways)), key=lambda number: rough[number])
        exact = [number for number in order if ways[number].config["reduction"] in (NO_REDUCTION, IN_FLOAT32)]
        finalists = list(dict.fromkeys([0, *order[:FINALISTS], *exact[:FINALISTS]]))
        torchs, *fine = graph_seconds([linear, *(self._works(ways[number]) for number in finalists)], FINE)
        times = dict(zip(finalists, fine, strict=True))
        fastest = min(times, key=lambda number: times[number])
        found = {
            f"first ({ways[0].describe()})": times[0],
            f"best of {len(ways)} ({ways[fastest].describe()})": times[fastest],
        }
        kept = min((number for number in times if number in exact), key=lambda number: times[number], default=fastest)
        if kept != fastest:
            found[f"best in float32 ({ways[kept].describe()})"] = times[kept]
        return torchs, found

    def _all(self) -> list[Candidate]:
        """The first choice first, none twice."""
        proposed = self._problem.candidates(PROPOSALS) + self._problem.candidates(PROPOSALS, IN_FLOAT32)
        split = [way for each in proposed[:SPLIT_OF] for way in self._problem.splits(each, SPLITS)]
        ways: dict[bytes, Candidate] = {}
        for way in proposed + split:
            ways.setdefault(bytes(way.algo), way)
        return list(ways.values())

    def _works(self, way: Candidate) -> list[partial[None]]:
        return [partial(self._multiply, way, weight) for weight in self._weights]

    def _multiply(self, way: Candidate, weight: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._x.device).cuda_stream if self._x.device.type == "cuda" else 0
        self._problem.multiply(way, self._x, weight, self._out, self._workspace, stream)

    def _is_right(self, way: Candidate) -> bool:
        try:
            self._multiply(way, self._weights[0])
        except CublasLtError:
            return False
        expected = F.linear(self._x, self._weights[0]).float()
        return float((self._out.float() - expected).abs().amax() / expected.abs().amax()) <= TOLERANCE
