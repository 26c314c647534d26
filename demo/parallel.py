"""Data-parallel workers on one machine: one process and one thread each, gradients averaged over gloo.

Processes wait asleep where OpenMP threads spin, so a run keeps its pace on a machine that others use as well.
Without workers (a single process) every function here is a no-op.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def rank() -> int:
    """This worker's number; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Replace every gradient by its mean over the workers, in one exchange."""
    if not dist.is_initialized():
        return
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def run_workers(workers: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(*arguments)` in this many processes and wait; in this process when it is one."""
    if workers == 1:
        function(*arguments)
        return
    with tempfile.TemporaryDirectory(prefix="demo-train-") as folder:
        meeting_point = Path(folder) / "store"
        torch.multiprocessing.start_processes(
            _worker, (workers, meeting_point, function, arguments), nprocs=workers, start_method="spawn"
        )


def _worker(number: int, workers: int, meeting_point: Path, function: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=number, world_size=workers)
    function(*arguments)
    # Gloo's threads may be in an exchange with a worker that is still at work: all come to the end first. Then the
    # process ends without taking the group apart, in which those threads now and then abort it.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
