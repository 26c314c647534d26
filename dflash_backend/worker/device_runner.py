"""Executes step plans on a GPU, one behind the other, without waiting for any. Called by the engine core, through
`Worker`; `docs/gpu.md` has the whole path.

`submit` brings the plan's changes and its layout to the device, queues the step and the copy of its results, and
returns. What depends on a value is decided on the device (`device_step`). `collect` waits for the oldest results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.core.plan import RequestResult, ScheduledRequest, StepOutOfMemory, StepPlan, StepResult
from dflash_backend.drafters.base import Drafter
from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import TargetModel
from dflash_backend.worker.device_guard import DeviceGuard
from dflash_backend.worker.device_layout import HostRows, LayoutBuffer, RowTraits
from dflash_backend.worker.device_requests import DeviceRequests
from dflash_backend.worker.device_special import SpecialRows
from dflash_backend.worker.device_state import Accepted, DeviceState
from dflash_backend.worker.device_step import DeviceStep, Hooks
from dflash_backend.worker.graphs import EagerStep, GraphCapturer, PaddedSteps, Progress, ladder
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.runner import PHASES
from dflash_backend.worker.step_errors import step_errors
from dflash_backend.worker.step_ops import StepOps
from dflash_backend.worker.transfers import MAX_STEPS_IN_FLIGHT, Download, Downloader
from dflash_backend.worker.warm_up import warm_up


@dataclass(frozen=True)
class RunnerSizes:
    """What a device runner makes room for.

    num_rows, num_tokens: the most of one step. max_model_len: the most tokens of one request. k: the most drafts.
    """

    num_rows: int
    num_tokens: int
    max_model_len: int
    k: int


@dataclass(frozen=True)
class StepInFlight:
    """A step that was submitted and not collected. `results` is None for one without rows; it has `num_rows` rows,
    padding included. All that `collect` needs is here: the requests may be gone by then."""

    step_id: int
    rows: list[ScheduledRequest] = field(default_factory=list)
    num_rows: int = 0
    results: Download | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class DeviceRunner:
    """Owns the device: models, K/V, request state and graphs.

    On a CPU, with the torch or the interpreted Triton operations, it runs the same steps; then `submit` waits.
    """

    overlaps = True

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        kv: PagedKVCache,
        backend: AttentionBackend,
        ops: StepOps,
        sizes: RunnerSizes,
        greedy_drafts: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.kv = kv
        self.backend = backend
        self.device = device
        self.state = DeviceState.allocate(sizes.num_rows, sizes.max_model_len, sizes.k, kv.block_size, device)
        self.requests = DeviceRequests(self.state, target.spec.vocab_size, greedy_drafts, device)
        self.step = DeviceStep(target, drafter, kv, backend, ops, self.state, greedy_drafts, dtype)
        num_tokens = max(sizes.num_tokens, sizes.num_rows * (sizes.k + 1))
        self.layouts = LayoutBuffer(sizes.num_rows, num_tokens, device)
        self.padded = PaddedSteps(self.step, self.layouts)
        self._max_tokens = sizes.num_tokens
        # Rows that a step has tokens for when all of them draft: with more, most of a padded step would be padding.
        self._max_padded_rows = max(1, min(sizes.num_rows, sizes.num_tokens // self.step.width))
        self._downloader = Downloader(self.step.result_size(self.layouts.max_rows), device)
        self._in_flight: deque[StepInFlight] = deque()

    @torch.inference_mode()
    def prepare(
        self,
        use_graphs: bool,
        progress: Progress,
        sizes: Sequence[int] | None = None,
        serves: bool = True,
    ) -> None:
        """To be called once, before the first step: makes the padded steps that decode rows alone run in.

        With `use_graphs` they are captured, on a GPU whose attention backend allows it; that takes seconds, of which
        `progress` hears `(message, fraction)`. `sizes`: the numbers of rows that they have, a ladder by default.
        Without `serves` only what greedy decode rows need: no padded steps for sampled requests, and on a GPU the
        kernels of other steps are compiled when they come.
        """
        sizes = sizes or ladder(self._max_padded_rows)
        if self.device.type == "cuda" and serves:
            self.requests.keep_draft_probs()  # at the address that graphs know from now on
            progress("compiling kernels", 0.0)
            warm_up(self.step, self.layouts, self._max_tokens)
        if not self.backend.capabilities.capturable and self.device.type == "cuda":
            return  # a backend that takes its sizes from exact lengths would run every row at its greatest
        if use_graphs and self.device.type == "cuda":
            self.padded.make(GraphCapturer(self.step, self.layouts), sizes, serves, progress)
        else:
            self.padded.make(lambda inputs: EagerStep(self.step, inputs), sizes, serves, lambda message, done: None)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """See `core.plan.Worker`. Raises `KVWriteError` when the guard is on and finds a breach."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"step {plan.step_id} was submitted with {MAX_STEPS_IN_FLIGHT} steps not collected yet")
        with step_errors(plan, self.device):
            self.requests.update(plan)
            self._in_flight.append(self._run(plan) if plan.rows else StepInFlight(plan.step_id))

    def reset(self) -> None:
        """See `core.plan.Worker`."""
        self.requests.clear()

    def collect(self) -> StepResult:
        """See `core.plan.Worker`."""
        flight = self._in_flight.popleft()
        if flight.results is None:
            return StepResult(flight.step_id, [])
        counts, tokens, times = self.step.unpacked(flight.results.wait(), flight.num_rows)
        token_ids = tokens.tolist()
        rows = []
        for i, (row, count) in enumerate(zip(flight.rows, counts.tolist(), strict=False)):
            new = token_ids[i][: count + 1] if row.sample else []
            rows.append(RequestResult(row.request_id, new, count, flight.logprobs.get(i)))
        seconds = dict(zip(PHASES, (np.diff(times) / 1e9).tolist(), strict=True)) if times.any() else {}
        return StepResult(flight.step_id, rows, seconds)

    def _run(self, plan: StepPlan) -> StepInFlight:
        """Queue a step that has rows. Raises `StepOutOfMemory`."""
        rows = HostRows.of(plan.rows, self.requests)
        try:
            return self._launch(plan, rows, rows.traits(self.requests))
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise StepOutOfMemory(
                f"step {plan.step_id} with {len(plan.rows)} rows and {plan.num_tokens} tokens does not fit the memory "
                f"of {self.device} ({str(error).partition('.')[0]}); lower max_num_batched_tokens or "
                "gpu_memory_utilization if this comes often"
            ) from None

    def _launch(self, plan: StepPlan, rows: HostRows, traits: RowTraits) -> StepInFlight:
        """Queue a step that has rows, and the copy of its results."""
        special = SpecialRows.of(plan.rows, rows, self.requests)
        padded = self.padded.find(rows, traits) if special is None else None
        if padded is not None:
            self.layouts.send_padded(rows, padded.inputs.num_rows, self.step.width)
            inputs = padded.inputs
        else:
            inputs = self.layouts.send_ragged(rows, traits)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if padded is not None and plan.writable_block_ids is None:
            result = padded.replay()
        else:
            result = self.step.run(inputs, self._hooks(plan, special, logprobs))
        return StepInFlight(plan.step_id, plan.rows, inputs.num_rows, self._downloader.begin(result), logprobs)

    def _hooks(self, plan: StepPlan, special: SpecialRows | None, logprobs: dict[int, list[TokenLogprobs]]) -> Hooks:
        """What a step does beside; puts the log-probabilities of its rows into `logprobs`."""

        def note_logprobs(accepted: Accepted) -> None:
            assert special is not None
            logprobs.update(special.logprobs(accepted.count.cpu().numpy(), accepted.tokens.cpu().numpy()))

        check = None
        if plan.writable_block_ids is not None:
            check = DeviceGuard(plan, self.kv.block_size).check
        if special is None:
            return Hooks(check)
        return Hooks(check, special.adjust, note_logprobs if special.any_logprobs else None)
