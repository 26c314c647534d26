"""Which kernels a cycle's time goes to, and what lies between them: why a promise was missed, if one was."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import Cell, decoding
from benchmarks.gpu.results import KernelTime, StepProfile
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import scale, synchronize
from dflash_backend.core.engine import EngineCore

NUM_KERNELS = 20
NAME_WIDTH = 90


def profile_cell(
    core: EngineCore, shape: Shape, cell: Cell, k: int, num_cycles: int, device: torch.device
) -> list[KernelTime]:
    """The kernels that take the most time in `num_cycles` decode steps, the first ones first.

    The profiler itself costs time between kernels, so these are times of kernels and not of cycles. On a CPU they are
    those of torch's operations.
    """
    on_gpu = scale(device) == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with decoding(core, shape, cell, k, num_cycles), profile(activities=[activity]) as profiler:
        for _ in range(num_cycles):
            core.step()
        synchronize(device)
    times = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            times.append(
                KernelTime(
                    shape.name,
                    cell.batch,
                    cell.context,
                    k,
                    event.key[:NAME_WIDTH],
                    event.count / num_cycles,
                    microseconds / 1e6 / num_cycles,
                )
            )
    return sorted(times, key=lambda entry: -entry.seconds)[:NUM_KERNELS]


def step_profile(name: str, step: Callable[[], object], num_steps: int, device: torch.device) -> StepProfile | None:
    """The kernels of a step, the mean of `num_steps`; None where the profiler sees none, as on a CPU."""
    synchronize(device)
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if scale(device) == "cuda" else ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            step()
        synchronize(device)
        seconds = time.perf_counter() - started
    recorded = profiler.profiler
    events = [] if recorded is None else recorded.kineto_results.events()
    kernels = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if str(event.device_type()).endswith("CUDA")
    ]
    return summarise(name, kernels, seconds, num_steps) if kernels else None


def summarise(name: str, kernels: Sequence[tuple[int, int, str]], seconds: float, num_steps: int) -> StepProfile:
    """What kernels of `num_steps` steps come to, each with its begin and its end in nanoseconds; they may overlap.
    seconds: of the wall clock, of all steps."""
    busy, gaps, reached = 0, [], None
    times: dict[str, int] = defaultdict(int)
    calls: Counter[str] = Counter()
    for begin, end, kernel in sorted(kernels):
        times[kernel[:NAME_WIDTH]] += end - begin
        calls[kernel[:NAME_WIDTH]] += 1
        if reached is not None and begin > reached:
            gaps.append(begin - reached)
        busy += max(0, end - max(begin, begin if reached is None else reached))
        reached = end if reached is None else max(reached, end)
    by_time = sorted(times.items(), key=lambda item: -item[1])[:NUM_KERNELS]
    return StepProfile(
        name,
        len(kernels) / num_steps,
        seconds / num_steps,
        busy / 1e9 / num_steps,
        sum(gaps) / 1e9 / num_steps,
        statistics.median(gaps) / 1e9 if gaps else 0.0,
        [(kernel, calls[kernel] / num_steps, spent / 1e9 / num_steps) for kernel, spent in by_time],
    )
