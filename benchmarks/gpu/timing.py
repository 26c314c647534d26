"""Clocks for device work, and the two ceilings that floors are made from.

On a GPU, work is timed with events around it, after a warm-up. On a CPU the wall clock serves, which exercises the
benchmark and measures nothing that is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from benchmarks.gpu.floor import Ceilings

Scale = Literal["cuda", "cpu"]
# (bytes of the copy, side of the matrices)
CEILING_SIZES = {"cuda": (4 << 30, 8192), "cpu": (1 << 20, 128)}
REPEATS = 12
WARM_UP = 3
# More than the largest cache of a GPU.
CACHE_BYTES = 256 << 20
_scales: list[Scale] = []


def use_tiny_sizes() -> None:
    """From now on everything takes the sizes of a CPU: for a device that is not there (`fake_device`)."""
    _scales.append("cpu")


def scale(device: torch.device) -> Scale:
    """Whose sizes a measurement takes: a GPU's, or those of a CPU, where nothing is measured."""
    return "cpu" if _scales or device.type == "cpu" else "cuda"


def num_copies(device: torch.device, num_bytes: int) -> int:
    """How many tensors of this size no cache holds together."""
    return max(1, min(64, -(-CACHE_BYTES // max(num_bytes, 1)))) if scale(device) == "cuda" else 1


def seconds_each(device: torch.device, works: Sequence[Callable[[], object]], repeats: int = REPEATS) -> float:
    """The time of one of `works`, which run one after the other as one graph."""

    def every() -> None:
        for work in works:
            work()

    with torch.inference_mode():
        return median_seconds(device, graph_of(device, every), repeats) / len(works)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of `work` on the device, once it is warm."""
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_wall_seconds(work) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        times.append((start, end))
    synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in times) / 1e3


def graph_of(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """`work` as one CUDA graph, so that launching costs nothing; on a CPU `work` itself."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy on the device, counting bytes read and written, and a large product of random matrices."""
    num_bytes, side = CEILING_SIZES[scale(device)]
    copy_s = median_seconds(device, _copy(num_bytes, device))
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product_s = median_seconds(device, lambda: left @ right)
    return Ceilings(copy_bandwidth=2 * num_bytes / copy_s, matrix_rate=2 * side**3 / product_s)


def _copy(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """A copy of `num_bytes` random bytes."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _wall_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
