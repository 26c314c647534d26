"""All products of a forward pass, one after another for seconds, with the clock and the power that the device had.

A product alone takes microseconds, and the device runs it at its highest clock. A server multiplies without a pause:
where that takes more power than the card may draw, its clock decreases, and with it the rate that a cycle can reach.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu.floor import Ceilings, Work, matrix
from benchmarks.gpu.results import Fact, KernelRun
from benchmarks.gpu.timing import graph_of, median_seconds, scale, synchronize

ROWS = {"cuda": (16, 128, 384, 512), "cpu": (2,)}
# Seconds that passes follow one another before they are timed, and of rest before the first.
BUSY_S = {"cuda": 2.0, "cpu": 0.01}
REST_S = {"cuda": 0.7, "cpu": 0.0}
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100")


@dataclass
class Load:
    """MHz of the multiprocessors and watts, as they were read; none without `nvidia-smi`."""

    clocks: list[float]
    watts: list[float]

    def __str__(self) -> str:
        if not self.clocks:
            return "clock and power not known"
        return f"{statistics.median(self.clocks):.0f} MHz, {statistics.median(self.watts):.0f} W"


@contextmanager
def load_of_device() -> Iterator[Load]:
    """What the device's clock and power are meanwhile: known once the block has ended."""
    load = Load([], [])
    if shutil.which(QUERY[0]) is None:
        yield load
        return
    with subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield load
        finally:
            process.terminate()
            text = process.communicate(timeout=20)[0]
    for line in text.splitlines():
        clock, _, watts = line.partition(",")
        try:
            reading = float(clock), float(watts)
        except ValueError:  # of a card that does not say it
            continue
        load.clocks.append(reading[0])
        load.watts.append(reading[1])


def measure(
    products: Sequence[tuple[str, int, int]],
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: Ceilings,
) -> Iterator[KernelRun | Fact]:
    """products: name, outputs and inputs of a layer's, the head last. A pass takes all of `num_layers` layers and
    the head, each with weights of its own. `others` has the time of the same pass after a rest."""
    *of_layer, head = products
    every = [*(of_layer * num_layers), head]
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _, outputs, inputs in every]
    for rows in ROWS[scale(device)]:
        inputs = {size: torch.randn(rows, size, device=device, dtype=dtype) for _, _, size in every}
        works = [partial(F.linear, inputs[weight.shape[1]], weight) for weight in weights]
        floor_s = sum(_floor(rows, weight, dtype).seconds(ceilings) for weight in weights)

        def forward(works: Sequence[partial[torch.Tensor]] = works) -> None:
            for work in works:
                work()

        with torch.inference_mode():
            replay = graph_of(device, forward)
            synchronize(device)
            time.sleep(REST_S[scale(device)])
            rested_s = median_seconds(device, replay, repeats=3)
            with load_of_device() as load:
                until = time.monotonic() + BUSY_S[scale(device)]
                while time.monotonic() < until:
                    replay()
                    synchronize(device)
                busy_s = median_seconds(device, replay)
        yield KernelRun(
            "all products of a pass", f"{rows} rows, without a pause", busy_s, floor_s, {"rested": rested_s}
        )
        yield Fact(f"all products of a pass without a pause, {rows} rows", str(load))


def _floor(rows: int, weight: torch.Tensor, dtype: torch.dtype) -> Work:
    outputs, inputs = weight.shape
    return matrix(inputs, outputs, rows, dtype.itemsize) + Work(dtype.itemsize * rows * (inputs + outputs))
