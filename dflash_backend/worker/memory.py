"""What the device's memory goes to, measured after the models are loaded: the KV cache gets what is left.

`measure_use` runs the steps that take the most memory of those that the scheduler can make, and looks at the peak.
There is no KV cache by then, so every row of these steps names block 0 over and over; what its tokens are does not
matter. A CPU's memory is not measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dflash_backend.config import ConfigError
from dflash_backend.core.plan import NewRequest, ScheduledRequest, SchedulerOutput, StepOutOfMemory
from dflash_backend.core.scheduler_config import SchedulerConfig, blocks_for
from dflash_backend.error_text import first_line
from dflash_backend.messages import SamplingParams
from dflash_backend.models.peers import RankLostError
from dflash_backend.worker.graphs import MIXED_TOKENS

GIB = 1024**3

# What captured graphs take beside the tensors of their largest step: nodes, parameters and what the driver keeps for
# them. An allowance that was not measured; `worker.graphs` captures no more than fits.
GRAPH_OVERHEAD_BYTES = GIB // 2

# Requests of the largest steps. Sampling takes more memory than a greedy request's logits, and filtering sorts where
# there are no kernels.
LARGEST_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)

RunStep = Callable[[SchedulerOutput], object]
"""Runs a step to its end."""


class CudaMemory:
    """Readings of a GPU's memory, in bytes, by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """All of it."""
        return torch.cuda.mem_get_info(self._device)[1]

    def in_use(self) -> int:
        """What this process and all others hold now."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def allocated(self) -> int:
        """What tensors of this process hold now."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Let `peak` begin at what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that tensors of this process held at a time since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        """Wait for the device and give back what no tensor needs, so that `in_use` counts no empty caches."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryUse:
    """Where a device's memory goes, in bytes. The KV cache is not among it.

    weights: of both models. others: CUDA itself, libraries, other programs. step: the most that a step takes beside,
    with the runner's own state; None before it was measured. graphs: set aside for captured graphs.
    """

    total: int
    weights: int
    others: int
    step: int | None = None
    graphs: int = 0

    def left(self, share: float) -> int:
        """What there is for the KV cache when the server may take `share` of the whole; below 0 when even that is
        passed."""
        return int(self.total * share) - self.weights - self.others - (self.step or 0) - self.graphs

    def describe(self, share: float) -> str:
        """The sum in words, for the log and for errors."""
        parts = [f"weights {_gib(self.weights)}", f"CUDA and other programs {_gib(self.others)}"]
        if self.step is not None:
            parts.append(f"the largest step {_gib(self.step)}")
        if self.graphs:
            parts.append(f"CUDA graphs {_gib(self.graphs)}")
        return (
            f"{_gib(self.total)} GiB in all, {_gib(self.total * share)} of it for the server and others "
            f"(gpu_memory_utilization = {share:g}): {', '.join(parts)}, left for the KV cache {_gib(self.left(share))}"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def expected_use(probe: CudaMemory, weights: int) -> MemoryUse:
    """The use as far as it is known before the models are loaded, whose weights take `weights` bytes: no more than
    it will be."""
    probe.release()
    return MemoryUse(probe.total(), weights, probe.in_use())


def measure_use(
    probe: CudaMemory, make_runner: Callable[[], RunStep], config: SchedulerConfig, captures: bool
) -> MemoryUse:
    """Run the largest steps and say what the memory goes to. The models are loaded, and nothing else.

    `make_runner` makes a worker over a pool of one block, which the steps write all their KV to; nothing of it stays.
    `captures`: decode steps, and those with few tokens of prompts, will be captured in graphs, whose memory nothing
    else can use. Raises `ConfigError` when a step does not fit.
    """
    probe.release()
    weights = probe.allocated()
    probe.reset_peak()
    try:
        step, captured = _run_largest(probe, make_runner(), config, captures)
    except (torch.OutOfMemoryError, StepOutOfMemory, RankLostError) as error:
        if isinstance(error, RankLostError) and not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"a step of max_num_batched_tokens = {config.max_num_batched_tokens} tokens and max_num_seqs = "
            f"{config.max_num_seqs} requests does not fit the GPU's memory of {_gib(probe.total())} GiB, of which the "
            f"models' weights take {_gib(weights)}: lower either setting, or free memory that other programs hold "
            f"({first_line(error)})"
        ) from None
    probe.release()
    graphs = captured + GRAPH_OVERHEAD_BYTES if captures else 0
    return MemoryUse(probe.total(), weights, max(probe.in_use() - weights, 0), step - weights, graphs)


def _run_largest(probe: CudaMemory, run: RunStep, config: SchedulerConfig, captures: bool) -> tuple[int, int]:
    """The peak of all that is allocated, and how far the largest step that is captured rises above what the runner
    holds: one of decode rows, or of as many tokens of prompts as a graph has, by which weights may become numbers that
    those of few decode rows leave in their codes."""
    prefill = prefill_step(config)
    run(prefill)
    decode = decode_step(config, prefill)
    run(decode)
    step = probe.peak()
    held = probe.allocated()
    probe.reset_peak()
    # By now the runner holds whatever it makes at first use.
    decode = decode_step(config, decode)
    run(decode)
    if captures:
        run(prefill_step(config, MIXED_TOKENS[-1], decode))
    return step, probe.peak() - held


def prefill_step(
    config: SchedulerConfig, most: int | None = None, before: SchedulerOutput | None = None
) -> SchedulerOutput:
    """The last chunks of as many prompts as there may be requests, with as many tokens as a step may have, `most` at
    most: the first is the longest request, then come more while there are tokens left for them, each with one at least.
    before: the step before, whose requests are removed."""
    longest = config.max_model_len - 1
    left = min(config.max_num_batched_tokens, most or config.max_num_batched_tokens)
    num_rows = min(config.max_num_seqs, left)
    step_id = 0 if before is None else before.step_id + 1
    rows = []
    for index in range(num_rows):
        num_new = min(left - (num_rows - 1 - index), longest)
        left -= num_new
        rows.append(_row(config, f"prefill-{step_id}-{index}", longest - num_new if index == 0 else 0, num_new, 0))
    finished = [] if before is None else [row.request_id for row in before.rows]
    return SchedulerOutput(step_id, rows, [_request(row) for row in rows], finished)


def decode_step(config: SchedulerConfig, before: SchedulerOutput) -> SchedulerOutput:
    """The step after `before`, whose requests are removed: a decode row with all its drafts for each request there
    may be, the first one as long as drafts are made."""
    k = config.num_speculative_tokens
    # The row's own 1 + k tokens, the anchor that follows, and the k drafts behind it (WINDOW).
    if config.max_drafting_len < 2 * k + 2:
        k = 0
    longest = config.max_drafting_len - 2 * k - 2 if k else config.max_model_len - 2
    num_rows = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // (1 + k)))
    starts = [longest] + [min(1, longest)] * (num_rows - 1)
    step_id = before.step_id + 1
    rows = [_row(config, f"decode-{step_id}-{index}", start, 1, k) for index, start in enumerate(starts)]
    return SchedulerOutput(step_id, rows, [_request(row) for row in rows], [row.request_id for row in before.rows])


def _row(config: SchedulerConfig, request_id: str, start: int, num_new: int, num_draft: int) -> ScheduledRequest:
    """A row that samples, and drafts where that fits (WINDOW)."""
    k = config.num_speculative_tokens
    end = start + num_new + num_draft
    num_next_draft = k if k and end + 1 + k <= config.max_drafting_len else 0
    num_blocks = blocks_for(end + config.lookahead[num_next_draft], config.block_size)
    return ScheduledRequest(request_id, start, num_new, num_draft, True, num_next_draft, [0] * num_blocks)


def _request(row: ScheduledRequest) -> NewRequest:
    """The request of a row, as it is when the row's drafts are not verified yet."""
    known = row.num_computed + row.num_new
    return NewRequest(row.request_id, [0] * known, known, LARGEST_SAMPLING, (), 0)
