"""Which kernels a cycle's time goes to: the profile that shows why a promise was missed, if one was."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import Cell, decoding
from benchmarks.gpu.results import KernelTime
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import synchronize
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
    on_gpu = device.type == "cuda"
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
