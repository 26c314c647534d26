"""Executes step plans: on a GPU one behind the other, without waiting for any; on a CPU at once.

`submit` brings the plan's changes and its layout to the device, queues the step and the copy of its results, and
returns. What depends on a value is decided on the device (`step`). `collect` waits for the oldest results. On a CPU
there is nothing to overlap with, and the rows of a step are shared among the cores instead (`batch_parallel`).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch

from dflash_backend.core.plan import (
    DraftBudget,
    RequestResult,
    ScheduledRequest,
    StepFailed,
    StepOutOfMemory,
    StepPlan,
    StepResult,
)
from dflash_backend.error_text import first_line
from dflash_backend.messages import ErrorStatus, TokenLogprobs
from dflash_backend.models.peers import RankLostError
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.worker.batch import HostBatch, LayoutBuffer
from dflash_backend.worker.batch_parallel import BatchThreads
from dflash_backend.worker.grammars import GrammarAnswer, GrammarStates, StepGrammars
from dflash_backend.worker.graphs import (
    CaptureError,
    ChosenTokens,
    EagerStep,
    GraphCapturer,
    GraphRunner,
    MakeStep,
    PaddedStep,
    Progress,
    capture_sizes,
    mixed_shapes,
    no_collection,
    warm_up,
)
from dflash_backend.worker.logits import LogitsProcessors, PendingLogprobs, PromptLogprobs, SpecialRows
from dflash_backend.worker.state import RequestStates
from dflash_backend.worker.step import PHASES, ModelStep, StepOutput
from dflash_backend.worker.step_ops import HostStepOps, drafting_rows
from dflash_backend.worker.transfers import MAX_STEPS_IN_FLIGHT, Download, Downloader, share
from dflash_backend.worker.write_guard import KVWriteError, WriteGuard
from dflash_kernels.log_odds import MAX_LOG_ODDS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartInFlight:
    """Rows of a step that run together. `results` has `num_rows` rows, padding included. `complete` queues what follows
    the target's forward, where that waits for the step before: then the results are not there yet."""

    rows: Sequence[ScheduledRequest]
    num_rows: int
    results: Download | None
    logprobs: PendingLogprobs | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    grammars: StepGrammars | None = None
    complete: Callable[[], StepOutput] | None = None


@dataclass(frozen=True)
class StepInFlight:
    """A step that was submitted and not collected: all that `collect` needs, since its requests may be gone by then."""

    step_id: int
    rows: list[ScheduledRequest] = field(default_factory=list)
    parts: list[PartInFlight] = field(default_factory=list)
    has_confidence: bool = True


class ModelRunner:
    """Runs the steps of plans, on the device that the models, the KV and the requests' state of `step` are on."""

    def __init__(
        self,
        step: ModelStep,
        max_tokens: int,
        threads: BatchThreads | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """max_tokens: the most tokens of one step. threads: those that share the rows of a step, with `HostStepOps`; by
        default the caller's alone. grammars: where requests with structured output find theirs."""
        self.step = step
        self.device = step.device
        self.overlaps = not step.ops.on_host
        self.requests = RequestStates(step.state, step.target.spec.vocab_size)
        self.threads = threads or BatchThreads(1)
        beside = self.threads.num_workers == 1
        self.grammars = GrammarStates(grammars, step.target.spec.vocab_size, self.device, beside)
        num_rows = len(step.state.tokens)
        self.layouts = LayoutBuffer(
            num_rows, max(max_tokens, num_rows * step.width), step.state.k, self.device, step.kv.block_size
        )
        self.graphs = GraphRunner(step, self.layouts)
        self._max_tokens = max_tokens
        # Rows that a step has tokens for when all of them draft: with more, most of a padded step would be padding.
        self._max_padded_rows = max(1, min(num_rows, max_tokens // step.width))
        self._downloader = Downloader(step.result_size(self.layouts.max_rows), self.device)
        self._in_flight: deque[StepInFlight] = deque()

    @torch.inference_mode()
    def prepare(
        self,
        use_graphs: bool,
        progress: Progress,
        sizes: Sequence[int] | None = None,
        serves: bool = True,
        shapes: Sequence[tuple[int, int]] = (),
        mixed: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Make the padded steps; to be called once, before the first step. With `HostStepOps` there are none.

        With `use_graphs` they are captured, on a GPU whose attention backend allows it; that takes seconds, which
        `progress` is told of as `(message, fraction)`. `sizes`: the numbers of rows that they have, `capture_sizes` by
        default; `shapes`: the drafts that they verify and propose, for each row, by default k and k. `mixed`: rows and
        tokens of the steps with prompts, `mixed_shapes` by default where steps are captured. Without `serves`
        only what greedy decode rows need: no padded steps for sampled requests, and on a GPU the kernels of other steps
        are compiled when they come.
        """
        if self.step.ops.on_host:
            return
        # With many shapes for each number of rows, their numbers of tokens lie close enough, but for the largest.
        finest = capture_sizes(self._max_padded_rows, self.step.width) if shapes and sizes is None else ()
        sizes = sizes or capture_sizes(self._max_padded_rows, 1 if shapes else self.step.width)
        if self.device.type == "cuda" and serves:
            progress("compiling kernels", 0.0)
            warm_up(self.step, self.layouts, self._max_tokens, [width for _, width in shapes])
        if not self.step.backend.capabilities.capturable and self.device.type == "cuda":
            return  # a backend that takes its sizes from exact lengths would run every row at its greatest
        captures = use_graphs and self.device.type == "cuda"
        if captures:
            make: MakeStep = GraphCapturer(self.step, self.layouts)
            mixed = self._mixed_shapes() if mixed is None and serves else mixed or ()
        else:
            # Without graphs a step with prompts gains nothing by padding.
            make, progress, mixed = partial(EagerStep, self.step), lambda message, done: None, mixed or ()
        try:
            with no_collection() if captures else nullcontext():
                self.graphs.make(make, sizes, serves, progress, shapes, finest)
                self.graphs.make_mixed(make, mixed, serves, progress)
        except CaptureError as error:
            self.graphs.clear()
            _log.error(
                "CUDA graphs cannot be captured here (%s). Steps run operation by operation, which is much slower; "
                "enable_cuda_graphs=false starts without the attempt",
                error,
            )

    def _mixed_shapes(self) -> list[tuple[int, int]]:
        """Those of `mixed_steps`; none where a row's bound costs more than empty tiles: recurrent layers, and attention
        in pieces of fixed positions."""
        if self.step.pool is not None or not self.step.backend.capabilities.shares_work:
            return []
        return mixed_shapes(len(self.step.state.tokens), self._max_tokens, self.step.width)

    def submit(self, plan: StepPlan) -> None:
        """As `core.plan.Worker.submit`. Raises `KVWriteError` when the guard is on and finds a breach."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"step {plan.step_id} was submitted with {MAX_STEPS_IN_FLIGHT} steps not collected yet")
        with step_errors(plan, self.device), torch.inference_mode():
            self._update(plan)
            parts = self._run(plan) if plan.rows else []
            has_confidence = plan.wants_confidence and self.step.wants_confidence and plan.drafts
            self._in_flight.append(StepInFlight(plan.step_id, plan.rows, parts, has_confidence))

    def reset(self) -> None:
        """As `core.plan.Worker.reset`."""
        self.requests.clear()
        if self.step.pending is not None:
            self.step.pending.clear()
        self.grammars.clear()

    def collect(self) -> StepResult:
        """As `core.plan.Worker.collect`."""
        step = self._in_flight.popleft()
        results: dict[str, RequestResult] = {}
        phases: dict[str, float] = {}
        mask_seconds = 0.0
        for part in step.parts:
            assert part.results is not None, "the step before completes this one"
            numbers = self.step.unpacked(part.results.wait(), part.num_rows)
            self.step.target.peers.check()  # a step whose rank is lost ends too, with any numbers
            num_verified, times = numbers.verified, numbers.times
            sure = numbers.confidences.tolist() if step.has_confidence else []
            counts = zip(part.rows, numbers.accepted, numbers.tokens, strict=False)
            new_tokens = [ids[: count + 1] if row.sample else [] for row, count, ids in counts]
            logprobs_of = part.logprobs.entries(new_tokens) if part.logprobs is not None else {}
            for i, (row, count, new) in enumerate(zip(part.rows, numbers.accepted, new_tokens, strict=False)):
                logprobs, of_prompt = logprobs_of.get(i), part.prompt_logprobs.get(i)
                of_next = sure[i][: row.num_next_draft] if sure else []
                num_next, error = None, None
                status: ErrorStatus = "INTERNAL"
                if part.grammars is not None and (answer := part.grammars.answers.get(i)) is not None:
                    proposed = numbers.drafts[i, : row.num_next_draft].tolist()
                    num_next, of_next = self._with_grammar(row, new, answer, proposed, of_next)
                    error, status = answer.error, answer.error_status
                results[row.request_id] = RequestResult(
                    row.request_id,
                    new,
                    count,
                    logprobs,
                    of_prompt,
                    num_next,
                    error,
                    status,
                    num_verified=num_verified[i],
                    confidences=of_next,
                )
            if part.grammars is not None:
                mask_seconds += part.grammars.mask_seconds
            # Parts run side by side: the phases of the slowest one add up to no more than the step.
            if (times[-1] - times[0]) / 1e9 > sum(phases.values()):
                seconds = [(end - start) / 1e9 for start, end in itertools.pairwise(times)]
                phases = dict(zip(PHASES, seconds, strict=True))
        if self._in_flight:
            self._complete(self._in_flight[0])
        return StepResult(step.step_id, [results[row.request_id] for row in step.rows], phases, mask_seconds)

    def _with_grammar(
        self,
        row: ScheduledRequest,
        new: list[int],
        answer: GrammarAnswer,
        proposed: list[int],
        confidences: list[float],
    ) -> tuple[int | None, list[float]]:
        """How many drafts the next row of a request with a grammar verifies, None for all, and how sure they are, once
        it has taken its row's tokens `new` and the drafts that were proposed."""
        next_step = self._grammars_in_flight()
        has_next = next_step is not None and next_step.has(answer)
        kept = answer.accept(new, proposed, has_next)
        if has_next or kept is proposed or answer.error is not None:
            return None, confidences
        num_own = next((i for i, pair in enumerate(zip(kept, proposed, strict=False)) if pair[0] != pair[1]), len(kept))
        if num_own < len(kept):
            if self.grammars.holds(row.request_id, answer):
                first = answer.num_tokens
                index = self.requests.records[row.request_id].index
                self.step.state.tokens[index, first : first + len(kept)] = torch.tensor(kept, device=self.device)
                self.step.state.confidence[index, num_own : len(kept)] = MAX_LOG_ODDS
            # What the grammar has put in place of drafts is certain.
            if confidences:
                confidences = confidences[:num_own] + [MAX_LOG_ODDS] * (len(kept) - num_own)
        return len(kept), confidences

    def _grammars_in_flight(self) -> StepGrammars | None:
        """Those of the step in flight, if there is one with any; on a CPU there never is."""
        return self._in_flight[0].parts[0].grammars if self._in_flight and self._in_flight[0].parts else None

    def _update(self, plan: StepPlan) -> None:
        """Bring a plan's changes to the requests' state."""
        self.requests.update(plan)
        self.grammars.update(plan)
        if self.step.pending is not None:
            for new in plan.new_requests:
                self.step.pending.drop(self.requests.records[new.request_id].index)
        if self.step.pool is not None:
            # What the steps before have yet to write is written first.
            first = len(self.step.state.tokens)
            starts = [(new.snapshot_slot, new.request_id) for new in plan.new_requests]
            self.step.pool.copy(
                [(first + slot, self.requests.records[name].index) for slot, name in starts if slot is not None]
            )

    def _copied_states(self, rows: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
        """The slots of the rows' recurrent states that are copied behind them, and those that they are copied to."""
        first = len(self.step.state.tokens)
        return [
            (self.requests.records[row.request_id].index, first + row.snapshot_slot)
            for row in rows
            if row.snapshot_slot is not None
        ]

    def _run(self, plan: StepPlan) -> list[PartInFlight]:
        """Queue a step that has rows. Raises `StepOutOfMemory`."""
        try:
            if not self.step.ops.on_host:
                return [self._run_part(plan, plan.rows)]
            parts = self.threads.split(self._verified_rows(plan), self.grammars.request_ids)
            return self.threads.run(lambda rows: self._run_part(plan, rows), parts)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise StepOutOfMemory(
                f"step {plan.step_id} with {len(plan.rows)} rows and {plan.num_tokens} tokens does not fit the memory "
                f"of {self.device} ({str(error).partition('.')[0]}); lower max_num_batched_tokens or "
                "gpu_memory_utilization if this comes often"
            ) from None

    def _verified_rows(self, plan: StepPlan) -> list[ScheduledRequest]:
        """A plan's rows with the drafts that its budget has for them, on a CPU."""
        if plan.budget is None:
            return plan.rows
        req_idx = np.array([self.requests.records[row.request_id].index for row in plan.rows])
        num_draft = np.array([row.num_draft for row in plan.rows])
        lens = HostStepOps.verified_lens(plan.budget, req_idx, num_draft, self.step.state)
        return [
            row if row.num_draft == num_verified else msgspec.structs.replace(row, num_draft=num_verified)
            for row, num_verified in zip(plan.rows, lens.tolist(), strict=True)
        ]

    def _run_part(self, plan: StepPlan, rows: Sequence[ScheduledRequest]) -> PartInFlight:
        """Queue a step of some of a plan's rows, and the copy of its results; in inference mode, which each thread has
        for itself."""
        budget = None if self.step.ops.on_host else plan.budget
        if budget is not None and any(self.requests.records[row.request_id].needs_layout for row in rows):
            rows, budget = evenly_truncated(rows, budget), None
        batch = HostBatch.of(rows, self.requests, budget, plan.wants_confidence, plan.shared_prefixes)
        guard = None if plan.writable_block_ids is None else WriteGuard(plan, rows, self.step.kv.block_size)
        of_prompt = PromptLogprobs.of(batch, self.requests)
        grammars = self.grammars.of(batch, self._grammars_in_flight())
        copies = self._copied_states(rows) if self.step.pool is not None else []
        waits = grammars is not None and grammars.waits
        padded = self.graphs.find(batch) if not copies and of_prompt is None else None
        if guard is not None and not batch.decode_only:
            padded = None
        if padded is not None:
            self.layouts.send_padded(batch, padded.inputs.num_rows, padded.inputs.num_tokens)
        complete: Callable[[], StepOutput]
        if padded is not None and guard is None:
            inputs = padded.inputs
            special = SpecialRows.of(batch, self.requests, grammars)
            complete = partial(self._complete_padded, padded, padded.verify(), special, grammars)
        else:
            if padded is not None:
                inputs = padded.inputs
            elif self.step.ops.on_host:
                inputs = replace(batch.ragged(share), drafting=drafting_rows(rows, self.requests))
            else:
                inputs = self.layouts.send_ragged(batch)
            processors = LogitsProcessors.of(batch, self.requests)
            forwarded = self.step.forward(inputs, guard, processors, of_prompt)
            complete = partial(self.step.complete, forwarded, guard, processors, grammars, copies)
        entries = of_prompt.entries if of_prompt else {}
        if waits:
            return PartInFlight(rows, inputs.num_rows, None, None, entries, grammars, complete)
        output = complete()
        results = self._downloader.begin(output.numbers)
        return PartInFlight(rows, inputs.num_rows, results, output.logprobs, entries, grammars)

    def _complete_padded(
        self, padded: PaddedStep, chosen: ChosenTokens, special: SpecialRows | None, grammars: StepGrammars | None
    ) -> StepOutput:
        """What follows the first half of a padded step; waits for the masks of grammars."""
        logprobs = None
        if special is not None:
            logprobs = special.choose(chosen.logits, chosen.target_tokens, self.step.ops)
        output = StepOutput(padded.finish(), logprobs)
        if grammars is None:
            return output
        try:
            return self.step.with_drafts(output, padded.inputs.batch)
        except torch.OutOfMemoryError as error:
            # The requests' state has moved on, so the step must not be tried again.
            raise RuntimeError(f"no memory for the drafts that grammars look at: {first_line(error)}") from None

    @torch.inference_mode()
    def _complete(self, step: StepInFlight) -> None:
        """Queue what follows the forward of a step that waited for the results before it. The device runs the forward
        meanwhile, and the masks are filled."""
        for number, part in enumerate(step.parts):
            if part.complete is not None and part.grammars is not None:
                part.grammars.begin()
                try:
                    output = part.complete()
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    output = part.complete()
                results = self._downloader.begin(output.numbers)
                step.parts[number] = replace(part, results=results, logprobs=output.logprobs, complete=None)


def evenly_truncated(rows: Sequence[ScheduledRequest], budget: DraftBudget) -> list[ScheduledRequest]:
    """Rows with the same number of drafts each, or fewer where a row has fewer, within a budget."""
    most = budget.num_drafts // max(1, sum(row.num_draft > 0 for row in rows))
    return [msgspec.structs.replace(row, num_draft=min(row.num_draft, most)) for row in rows]


@contextmanager
def step_errors(plan: StepPlan, device: torch.device) -> Iterator[None]:
    """Turn an error within the block, which runs `plan`, into `StepFailed`.

    Four kinds pass unchanged: `StepOutOfMemory`, which the core answers otherwise; `KVWriteError`, since other
    requests' KV may be damaged; `RankLostError`, since no step can follow; and the error of a GPU whose context is
    lost, which `torch.cuda.synchronize` raises.
    """
    try:
        yield
    except (StepOutOfMemory, KVWriteError, RankLostError):
        raise
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _log.exception("step %d with the requests %s failed", plan.step_id, [row.request_id for row in plan.rows])
        raise StepFailed(f"{type(error).__name__}: {error}") from error
