"""The engine at a steady state: a number of requests decode, each with a context of a given length.

The core, the scheduler and the device runner are the ones that serve. Two things are not as in service: prompts are not
computed (`SkippedPrefill`: the KV of the context is random numbers), and acceptance is drawn (`synthetic`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from benchmarks.gpu.floor import PHASES, Ceilings, CycleSize, cycle_work, floor_seconds
from benchmarks.gpu.results import DFLASH, NO_DRAFT, Cycle
from benchmarks.gpu.shapes import Shape
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import DraftOutput, ModelRunnerOutput, SchedulerOutput, Worker
from dflash_backend.messages import GenerationRequest, SamplingParams

WARM_UP = 6
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
# A cell ends after so long, with no fewer cycles than this.
LONGEST_S, FEWEST_CYCLES = 5.0, 3


class NotSteady(Exception):
    """The requests of a cell did not all decode in every step that was timed, so its times mean nothing."""


@dataclass(frozen=True)
class Cell:
    """A number of requests that decode together, and the positions behind each when measuring begins; `first`: behind
    the first one, where it has others."""

    batch: int
    context: int
    first: int | None = None

    def context_of(self, index: int) -> int:
        """Positions behind a request."""
        return self.first if self.first is not None and index == 0 else self.context

    @property
    def longest(self) -> int:
        """Positions behind the longest one."""
        return max(self.context_of(0), self.context)

    @property
    def mean_context(self) -> float:
        """Positions behind a request, the mean."""
        return sum(self.context_of(index) for index in range(self.batch)) / self.batch

    def num_blocks(self, k: int, num_cycles: int, block_size: int) -> int:
        """KV blocks that the requests hold at most, with the drafter's queries and a step in flight."""
        more = self.max_tokens(k, num_cycles) + 2 * (k + 1)
        return sum(-(-(self.context_of(index) + more) // block_size) for index in range(self.batch))

    @staticmethod
    def max_tokens(k: int, num_cycles: int) -> int:
        """Tokens that a request may yield: more than it can in all cycles, so that none ends."""
        return (WARM_UP + num_cycles + 4) * (k + 1)


class SkippedPrefill:
    """A worker that takes all but the last position of a prefill chunk as computed: its KV is what lies in memory.

    To the core it does what the worker behind it does, so a request of 32k tokens is ready to decode after one step.
    computes_prompts: it does not skip them for now. waited_s: seconds that `collect_results` has taken, in which
    the host had nothing to do.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.computes_prompts = False
        self.waited_s = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether `submit` returns before the step has run."""
        return self._worker.overlaps

    def submit(self, plan: SchedulerOutput) -> None:
        """Submit the plan with each prompt reduced to its last token, as if the others were computed."""
        if self.computes_prompts:
            self._worker.submit(plan)
            return
        rows = [
            msgspec.structs.replace(row, num_computed=row.num_computed + row.num_new - 1, num_new=1)
            for row in plan.rows
        ]
        self._worker.submit(replace(plan, rows=rows))

    def collect_results(self) -> ModelRunnerOutput:
        """The result of the oldest step."""
        started = time.perf_counter()
        result = self._worker.collect_results()
        self.waited_s += time.perf_counter() - started
        return result

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        """The drafts of the step that was collected last."""
        started = time.perf_counter()
        drafts = self._worker.collect_drafts(ended)
        self.waited_s += time.perf_counter() - started
        return drafts

    def reset(self) -> None:
        """Remove every request."""
        self._worker.reset()


def worker_of(core: EngineCore) -> SkippedPrefill:
    """The worker of a core that runs on one."""
    worker = core._worker
    assert isinstance(worker, SkippedPrefill)
    return worker


@contextmanager
def decoding(
    core: EngineCore, shape: Shape, cell: Cell, k: int, num_cycles: int, sampling: Mapping[str, Any] = GREEDY
) -> Iterator[int]:
    """In this block `cell.batch` requests decode, k drafts each (0: none), and can for `num_cycles` steps. Gives the
    number of tokens that they have generated before. sampling: their parameters."""
    prompt = torch.randint(1, shape.target.vocab_size - 1, (cell.longest,), generator=_generator(cell)).tolist()
    asked = SamplingParams(max_tokens=cell.max_tokens(k, num_cycles), **sampling)
    names = [f"{cell.batch}-{cell.context}-{k}-{index}" for index in range(cell.batch)]
    for index, name in enumerate(names):
        core.add_request(GenerationRequest(name, prompt[: cell.context_of(index)], asked, ()))
    try:
        yield sum(len(delta.token_ids) for _ in range(WARM_UP) for delta in core.step().deltas)
    finally:
        core.abort(names)
        while core.has_unfinished():  # a step of theirs is still in flight
            core.step()


def run_cell(
    core: EngineCore,
    shape: Shape,
    cell: Cell,
    k: int,
    num_cycles: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    system: str | None = None,
    sampling: Mapping[str, Any] = GREEDY,
) -> Cycle:
    """Bring `cell.batch` requests to decode and time `num_cycles` steps of them by the wall clock, fewer if slow.

    `core` runs on a `SkippedPrefill`; `system` is what it is called, by default with and without drafts. The phases are
    what the worker says of each step. Raises `NotSteady` when the
    requests do not all decode in every step that is timed.
    """
    phases = dict.fromkeys(PHASES, 0.0)
    num_tokens, num_deltas, num_done = 0, 0, 0
    worker = worker_of(core)
    with decoding(core, shape, cell, k, num_cycles, sampling) as yielded:
        started, waited = time.perf_counter(), worker.waited_s
        while num_done < num_cycles and (num_done < FEWEST_CYCLES or time.perf_counter() - started < LONGEST_S):
            num_done += 1
            outputs = core.step()
            num_deltas += len(outputs.deltas)
            num_tokens += sum(len(delta.token_ids) for delta in outputs.deltas)
            for phase, seconds in outputs.phase_seconds.items():
                phases[phase] += seconds
        seconds, waited = time.perf_counter() - started, worker.waited_s - waited
    if num_deltas != num_done * cell.batch:
        raise NotSteady(f"{num_deltas} of {num_done * cell.batch} rows yielded tokens in {num_done} steps")
    context = cell.mean_context + (yielded + num_tokens / 2) / cell.batch
    size = CycleSize(cell.batch, context, k, dtype.itemsize)
    return Cycle(
        shape=shape.name,
        system=system or (DFLASH if k else NO_DRAFT),
        batch=cell.batch,
        context=context,
        nominal_context=cell.context,
        k=k,
        num_cycles=num_done,
        cycle_s=seconds / num_done,
        tokens_per_s=num_tokens / seconds,
        phases={phase: total / num_done for phase, total in phases.items()},
        floor=floor_seconds(cycle_work(shape, size), ceilings),
        host_s=(seconds - waited) / num_done,
    )


def _generator(cell: Cell) -> torch.Generator:
    return torch.Generator().manual_seed(cell.batch * 1_000_003 + cell.context)
