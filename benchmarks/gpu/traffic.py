"""What traffic is made of beside decode cycles of equal rows: prompts, prompts beside decode rows, rows of unlike
lengths, numbers of rows between those that graphs have, sampled rows, and the start of a server.

Prompts are computed here, by the core, the scheduler and the runner that serve.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.build import RandomEngine
from benchmarks.gpu.engine import GREEDY, Cell, decoding, worker_of
from benchmarks.gpu.floor import (
    Ceilings,
    CycleSize,
    Work,
    cycle_work,
    decoder_work,
    floor_seconds,
    head_work,
    inject_work,
)  # fmt: skip
from benchmarks.gpu.results import EQUAL, RAGGED, SAMPLED, SERVING, StartRun, StepRun
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.synthetic import SyntheticAcceptance
from dflash_backend.core.engine import EngineCore
from dflash_backend.messages import GenerationRequest, SamplingParams

# What Qwen3's model cards ask for.
SAMPLING: Mapping[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 1}
# A mixed step: rows that decode, positions behind them, tokens of the prompt beside them; and how many steps.
NUM_MIXED = {"cuda": 24, "cpu": 3}


@dataclass(frozen=True)
class TrafficCell:
    """A decode cell under a name, with its requests' parameters."""

    system: str
    cell: Cell
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class TrafficSizes:
    """prompts: tokens of each. chunk: of a prompt that a step takes at most. mixed: rows that decode, positions behind
    them, and tokens of the prompt beside them. cells: decode cells. row_sizes: numbers of rows that graphs have."""

    prompts: tuple[int, ...]
    chunk: int
    mixed: tuple[int, int, int]
    cells: tuple[TrafficCell, ...]
    row_sizes: tuple[int, ...]


def ragged(batch: int, context: int, first: int) -> list[TrafficCell]:
    """One row with more positions than the others, and as many rows that share all positions equally."""
    cell = Cell(batch, context, first)
    return [
        TrafficCell(RAGGED, cell, GREEDY),
        TrafficCell(EQUAL, Cell(batch, round(cell.mean_context)), GREEDY),
    ]


SIZES = {
    "cuda": TrafficSizes(
        prompts=(2048, 8192, 32768),
        chunk=8192,
        mixed=(8, 2048, 256),
        cells=(
            *ragged(8, 1024, 32768),
            *(TrafficCell(SERVING, Cell(batch, 1024), GREEDY) for batch in (5, 9, 17, 33)),
            *(TrafficCell(SAMPLED, Cell(batch, 1024), SAMPLING) for batch in (1, 8, 32)),
        ),
        # Those of `capture_sizes` that these cells take, with 15 drafts.
        row_sizes=(1, 8, 9, 18, 32, 36),
    ),
    "cpu": TrafficSizes(
        prompts=(40, 100),
        chunk=64,
        mixed=(2, 24, 16),
        cells=(
            *ragged(2, 16, 60),
            TrafficCell(SERVING, Cell(3, 24), GREEDY),
            TrafficCell(SAMPLED, Cell(2, 24), SAMPLING),
        ),
        row_sizes=(1, 2, 4),
    ),
}


def has_compiled_kernels() -> bool:
    """Whether Triton's cache has any."""
    directory = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return directory.is_dir() and any(directory.iterdir())


def start(engine: RandomEngine, acceptance: SyntheticAcceptance, chunk: int) -> tuple[EngineCore, StartRun]:
    """A core that computes prompts, and how long its start took."""
    cached = has_compiled_kernels()
    started = time.perf_counter()
    core = engine.core(engine.shape.num_speculative_tokens, acceptance, prompt_tokens=chunk)
    seconds = time.perf_counter() - started
    return core, StartRun(engine.shape.name, seconds, engine.num_graphs, cached)


def prompt_step(
    core: EngineCore,
    shape: Shape,
    tokens: int,
    chunk: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    name: str = "prompt",
) -> StepRun:
    """A prompt from its arrival to its first token, the second of two, since the first may wait for a library."""
    worker = worker_of(core)
    worker.computes_prompts = True
    try:
        for number in range(2):
            core.add_request(prompt_request(shape, f"{name}-{tokens}-{number}", tokens))
            seconds, device_s, host_s = _timed(core, None)
    finally:
        worker.computes_prompts = False
    floor_s = sum(prompt_floor(shape, begin, min(chunk, tokens - begin), dtype, ceilings)
                  for begin in range(0, tokens, chunk))  # fmt: skip
    return StepRun(shape.name, name, 0, tokens, seconds, device_s, host_s, floor_s)


def mixed_step(
    core: EngineCore,
    shape: Shape,
    mixed: tuple[int, int, int],
    k: int,
    num_steps: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
) -> StepRun:
    """Steps in each of which a prompt arrives while rows decode: means over them."""
    batch, positions, tokens = mixed
    worker, cell = worker_of(core), Cell(batch, positions)
    with decoding(core, shape, cell, k, num_steps):
        worker.computes_prompts = True
        try:
            waiting = (prompt_request(shape, f"mixed-{number}", tokens) for number in range(num_steps))
            seconds, device_s, host_s = _timed(core, waiting)
        finally:
            worker.computes_prompts = False
    floor_s = mixed_floor(shape, CycleSize(batch, positions, k, dtype.itemsize), tokens, ceilings)
    return StepRun(shape.name, "mixed", batch, tokens, seconds, device_s, host_s, floor_s)


def mixed_floor(shape: Shape, size: CycleSize, tokens: int, ceilings: Ceilings) -> float:
    """Seconds below which no device with these ceilings runs a cycle of this size and `tokens` tokens of a prompt in
    one step: it reads weights once, and multiplies them by the tokens of both."""
    works, seconds = cycle_work(shape, size), 0.0
    prompt, one_token = (prompt_work(shape, 0, count, size.itemsize) for count in (tokens, 1))
    for phase, work in works.items():
        # Of one token nearly all bytes are weights.
        read = prompt[phase].bytes - one_token[phase].bytes if phase in prompt else 0.0
        flops = prompt[phase].flops if phase in prompt else 0.0
        seconds += Work(work.bytes + read, work.flops + flops).seconds(ceilings)
    return seconds


def prompt_floor(shape: Shape, begin: int, tokens: int, dtype: torch.dtype, ceilings: Ceilings) -> float:
    """Seconds below which no device with these ceilings runs `tokens` tokens of a prompt behind `begin` of it."""
    return sum(floor_seconds(prompt_work(shape, begin, tokens, dtype.itemsize), ceilings).values())


def prompt_work(shape: Shape, begin: int, tokens: int, itemsize: int) -> dict[str, Work]:
    """The work of each phase that `tokens` tokens of a prompt have behind `begin` of it; of the head one row."""
    size = CycleSize(1, begin + tokens / 2, tokens - 1, itemsize)
    verify = decoder_work(shape.target.decoder, size) + head_work(shape, 1, itemsize)
    return {"verify": verify, "inject": inject_work(shape, size)}


def prompt_request(shape: Shape, name: str, tokens: int) -> GenerationRequest:
    """A request with a prompt of random tokens, for one token."""
    ids = torch.randint(1, shape.target.vocab_size - 1, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return GenerationRequest(name, ids.tolist(), SamplingParams(max_tokens=1, temperature=0.0), ())


def _timed(core: EngineCore, waiting: Iterator[GenerationRequest] | None) -> tuple[float, float, float]:
    """Run steps, each with one more request of `waiting` while there are any, or until nothing is left to do. Seconds
    by the wall clock, of the device and of the host: for each step with `waiting`, else in all."""
    worker, device_s, num_steps = worker_of(core), 0.0, 0
    started, waited = time.perf_counter(), worker.waited_s
    while True:
        if waiting is not None:
            request = next(waiting, None)
            if request is None:
                break
            core.add_request(request)
        elif not core.has_unfinished():
            break
        device_s += sum(core.step().phase_seconds.values())
        num_steps += 1
    seconds = time.perf_counter() - started
    count = num_steps if waiting is not None else 1
    return seconds / count, device_s / count, (seconds - worker.waited_s + waited) / count
