"""Decode steps of fixed shapes, each captured as a CUDA graph: a few numbers go in, and one launch runs the step.

A graph has a number of rows from a ladder, each with 1 + k places. A step with fewer rows is filled up with padding
rows, which read and write nothing (trap 7). There are two kinds: for steps of greedy requests alone, and for steps with
sampled ones. Whatever else a step asks for is run without a graph.

Built and used by the device runner. Without graphs the same padded steps run operation by operation.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from dflash_backend.worker.device_layout import Bounds, HostRows, LayoutBuffer, RowTraits, StepInputs
from dflash_backend.worker.device_step import DeviceStep

logger = logging.getLogger(__name__)

# Ladder steps are this far apart from the first multiple on.
LADDER_STRIDE = 8
# Padding costs arithmetic and a launch without a graph costs the host's time: rows are padded to twice their number at
# the most, or by this many.
ALWAYS_WORTH_PADDING = LADDER_STRIDE
# And a step to twice its tokens at the most, or to so many, for which a GPU still spends its time on reading weights.
# Rows without drafts are much narrower than their places.
CHEAP_TOKENS = 128
# Left free for what steps without a graph allocate.
RESERVED_BYTES = 1 << 30

Progress = Callable[[str, float], None]
GraphPool = Any
"""torch's handle for memory that graphs share; it has no public name."""


class PaddedStep(Protocol):
    """A decode step of a fixed shape."""

    inputs: StepInputs

    def replay(self) -> torch.Tensor:
        """Queue the step for the rows whose layout was sent last. The result is that of `DeviceStep.finish`, valid on
        the device until this step or another padded one is replayed."""
        ...


MakeStep = Callable[[StepInputs], PaddedStep | None]
"""Makes the padded step over these inputs; None when memory does not suffice."""


class EagerStep:
    """A padded step that is run operation by operation: on a CPU, and with `enable_cuda_graphs` off."""

    def __init__(self, step: DeviceStep, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._step = step

    def replay(self) -> torch.Tensor:
        """See `PaddedStep.replay`."""
        return self._step.run(self.inputs)


class CapturedStep:
    """A padded step in a CUDA graph."""

    def __init__(self, step: DeviceStep, inputs: StepInputs, pool: GraphPool, stream: torch.cuda.Stream) -> None:
        """Runs the step once on `stream`, for what is made at first use (compiled kernels, library handles), then
        captures it with its memory in `pool`. The layout on the device must be one of padding rows alone."""
        self.inputs = inputs
        with torch.cuda.stream(stream):
            step.finish(inputs, step.verify(inputs))
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._result = step.finish(inputs, step.verify(inputs))

    def replay(self) -> torch.Tensor:
        """See `PaddedStep.replay`."""
        self._graph.replay()
        return self._result


class GraphCapturer:
    """Captures padded steps, all with their memory in one pool: they run one at a time."""

    def __init__(self, step: DeviceStep, layouts: LayoutBuffer) -> None:
        self._step = step
        self._layouts = layouts
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, inputs: StepInputs) -> CapturedStep | None:
        """See `MakeStep`."""
        if torch.cuda.mem_get_info()[0] < RESERVED_BYTES:
            return None
        self._layouts.send_nothing(inputs.num_rows, self._step.width)
        torch.cuda.current_stream().synchronize()
        try:
            with _no_collection():
                return CapturedStep(self._step, inputs, self._pool, self._stream)
        except torch.OutOfMemoryError:
            return None


def ladder(max_rows: int) -> list[int]:
    """Numbers of rows that padded steps have: 1, 2, 4, then every eighth, and `max_rows`."""
    sizes = {size for size in (1, 2, 4) if size < max_rows}
    return sorted(sizes | set(range(LADDER_STRIDE, max_rows, LADDER_STRIDE)) | {max_rows})


class PaddedSteps:
    """The padded steps that there are, by kind (whether there are sampled requests) and number of rows."""

    def __init__(self, step: DeviceStep, layouts: LayoutBuffer) -> None:
        self._step = step
        self._layouts = layouts
        self._steps: dict[bool, list[PaddedStep]] = {False: [], True: []}

    def steps(self, sampled: bool) -> list[PaddedStep]:
        """Those of a kind."""
        return list(self._steps[sampled])

    def find(self, rows: HostRows, traits: RowTraits) -> PaddedStep | None:
        """The smallest padded step that can run `rows`; None when there is none, or none that is worth its padding."""
        if not rows.decode_only:
            return None
        count = len(rows.table)
        most = max(2 * count, count + ALWAYS_WORTH_PADDING)
        most = min(most, max(2 * int(rows.query_lens.sum()), CHEAP_TOKENS) // self._step.width)
        fitting = [step for step in self._steps[traits.sampled] if count <= step.inputs.num_rows <= most]
        return min(fitting, key=lambda step: step.inputs.num_rows, default=None)

    def make(self, make: MakeStep, sizes: Sequence[int], sampled: bool, progress: Progress) -> None:
        """Make the steps with these numbers of rows, in place of those that there were: greedy ones, and with `sampled`
        also those for sampled requests. `progress` hears `(message, fraction)`.

        The largest and the sampled ones come first: the others then share the memory that these took. Those that memory
        does not suffice for are left out, which the log says.
        """
        wanted = [(size, kind) for size in sorted(sizes, reverse=True) for kind in (True, False) if sampled or not kind]
        self._steps = {False: [], True: []}
        missing = []
        for number, (size, kind) in enumerate(wanted):
            name = f"{'sampled' if kind else 'greedy'} steps of {size} rows"
            progress(f"CUDA graphs: {name}", number / len(wanted))
            step = make(self._inputs(size, kind))
            if step is None:
                missing.append(name)
            else:
                self._steps[kind].append(step)
        if missing:
            logger.warning(
                "GPU memory runs short: %d of %d CUDA graphs are missing, the largest for %s. These steps run without, "
                "which is slower. Lower gpu_memory_utilization or max_num_seqs for more graphs",
                len(missing),
                len(wanted),
                missing[0],
            )

    def _inputs(self, num_rows: int, sampled: bool) -> StepInputs:
        """Of a padded step over the layout buffer: every token has a distribution, any length is possible and, with
        `sampled`, any cut."""
        state = self._step.state
        device = state.tokens.device
        longest = np.full(num_rows, state.max_len)
        return StepInputs(
            rows=self._layouts.padded_rows(num_rows, self._step.width),
            dist_token=None,
            dist_row=torch.arange(num_rows, dtype=torch.int32, device=device).repeat_interleave(self._step.width),
            bounds=Bounds(np.full(num_rows, self._step.width), longest, longest, max_overestimate=state.max_len),
            traits=RowTraits(sampled, self._step.drafter is not None and state.k > 0, sampled, sampled),
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection, which could free memory of the device in the midst of a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
