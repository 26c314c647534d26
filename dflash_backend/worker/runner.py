"""Executes step plans: on a GPU one behind the other, without waiting for any; on a CPU at once.

`submit` brings the plan's changes and its layout to the device, queues the step and the copy of its results, and
returns. What depends on a value is decided on the device (`step`). `collect_results` waits for the oldest results. On
a CPU there is nothing to overlap with, and the rows of a step are shared among the cores instead (`batch_parallel`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from dflash_backend.core.plan import (
    DraftBudget,
    DraftOutput,
    ModelRunnerOutput,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepFailed,
    StepOutOfMemory,
)
from dflash_backend.drafters.base import Drafter
from dflash_backend.drafters.exchange import exchange_weights
from dflash_backend.messages import ErrorStatus
from dflash_backend.models.peers import RankLostError
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.worker.batch import ForwardBatch, HostBatch, LayoutBuffer
from dflash_backend.worker.batch_parallel import BatchThreads
from dflash_backend.worker.grammars import GrammarAnswer, GrammarStates, StepGrammars
from dflash_backend.worker.graphs import (
    CaptureError,
    ForwardRunner,
    GraphCapturer,
    GraphDispatcher,
    MakeRunner,
    Progress,
    capture_sizes,
    mixed_shapes,
    no_collection,
    warm_up,
)
from dflash_backend.worker.kv_cache import KVWriteError, WriteGuard
from dflash_backend.worker.kv_mover import BackgroundMover
from dflash_backend.worker.logits import PendingLogprobs, PromptLogprobs, SpecialRows
from dflash_backend.worker.state import RequestStates
from dflash_backend.worker.step import PHASES, SpecDecodeModel, StateCopies
from dflash_backend.worker.step_ops import StateSnapshot
from dflash_backend.worker.transfers import MAX_STEPS_IN_FLIGHT, Download, Downloader, fetch
from dflash_kernels.log_odds import MAX_LOG_ODDS
from dflash_kernels.measured_linear import measuring
from dflash_kernels.verify_budget import verified_lens_reference

_log = logging.getLogger(__name__)


@dataclass
class PartInFlight:
    """Rows of a step that run together: `step`, padding included, run by `runner`.

    copies: as of `SpecDecodeModel.draft`. waits: the rest of the step follows the target's forward only when the step
    before it has drafted. results: on their way once drafts are accepted; draft_report, once they are proposed.
    proposed: int64 `[R, k]`, the drafts themselves, where a grammar asks for them.
    """

    rows: Sequence[ScheduledRequest]
    runner: ForwardRunner
    step: ForwardBatch
    guard: WriteGuard | None = None
    copies: StateCopies = ()
    special: SpecialRows | None = None
    prompt_logprobs: PromptLogprobs | None = None
    grammars: StepGrammars | None = None
    waits: bool = False
    results: Download | None = None
    logprobs: PendingLogprobs | None = None
    draft_report: Download | None = None
    proposed: Download | None = None


@dataclass(frozen=True)
class BatchInFlight:
    """A step that was submitted: all that `collect_results` and `collect_drafts` need, since its requests may be gone
    by then."""

    plan: SchedulerOutput
    parts: list[PartInFlight]


class ModelRunner:
    """Runs the steps of plans, on the device that the models, the KV and the requests' state of `model` are on."""

    def __init__(
        self,
        model: SpecDecodeModel,
        max_tokens: int,
        threads: BatchThreads | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """max_tokens: the most tokens of one step. threads: those that share the rows of a step, with `CpuStepOps`; by
        default the caller's alone. grammars: where requests with structured output find theirs."""
        self.model = model
        self.device = model.device
        self.overlaps = not model.ops.on_host
        self.requests = RequestStates(model.state, model.target.spec.vocab_size, model.target.adapter_names)
        self.threads = threads or BatchThreads(1)
        beside = self.threads.num_workers == 1
        self.grammars = GrammarStates(grammars, model.target.spec.vocab_size, self.device, beside)
        num_rows = len(model.state.tokens)
        self.layouts = LayoutBuffer(
            num_rows,
            max(max_tokens, num_rows * model.decode_query_len),
            model.state.k,
            self.device,
            model.kv.block_size,
        )
        self.graphs = GraphDispatcher(model, self.layouts)
        self.captured = False
        """Whether steps are captured in graphs."""
        self._max_tokens = max_tokens
        # Rows that a step has tokens for when all of them draft: with more, most of a padded step would be padding.
        self._max_padded_rows = max(1, min(num_rows, max_tokens // model.decode_query_len))
        self._results, self._draft_reports = (
            Downloader(size, self.device) for size in model.result_sizes(self.layouts.max_rows)
        )
        self._in_flight: deque[BatchInFlight] = deque()
        # The step that was collected last, until its drafts are.
        self._awaiting_drafts: BatchInFlight | None = None
        self.mover: BackgroundMover | None = None
        """What moves KV to tiers and back; None without them."""

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
        """Make the padded steps; to be called once, before the first step. With `CpuStepOps` there are none.

        With `use_graphs` they are captured, on a GPU whose attention backend allows it; that takes seconds, which
        `progress` is told of as `(message, fraction)`. `sizes`: the numbers of rows that they have, `capture_sizes` by
        default; `shapes`: the drafts that they verify and propose, for each row, by default k and k. `mixed`: rows and
        tokens of the steps with prompts, `mixed_shapes` by default where steps are captured. Without `serves`
        only what greedy decode rows need: no padded steps for sampled requests, and on a GPU the kernels of other steps
        are compiled when they come.
        """
        if self.model.ops.on_host:
            return
        # With many shapes for each number of rows, their numbers of tokens lie close enough, but for the largest.
        finest = capture_sizes(self._max_padded_rows, self.model.decode_query_len) if shapes and sizes is None else ()
        sizes = sizes or capture_sizes(self._max_padded_rows, 1 if shapes else self.model.decode_query_len)
        if self.device.type == "cuda" and serves:
            progress("compiling kernels", 0.0)
            warm_up(self.model, self.layouts, self._max_tokens, [width for _, width in shapes])
        if not self.model.backend.capabilities.capturable and self.device.type == "cuda":
            return  # a backend that takes its sizes from exact lengths would run every row at its greatest
        captures = use_graphs and self.device.type == "cuda"
        if captures:
            make: MakeRunner = GraphCapturer(self.model, self.layouts)
            mixed = self._mixed_shapes() if mixed is None and serves else mixed or ()
        else:
            # Without graphs a step with prompts gains nothing by padding.
            make, progress, mixed = lambda inputs: self.model, lambda message, done: None, mixed or ()
        try:
            with no_collection() if captures else nullcontext(), measuring() if captures else nullcontext():
                self.graphs.make(make, sizes, serves, progress, shapes, finest, mixed)
            if captures:
                self.captured = True
                torch.cuda.empty_cache()  # of the steps that ran before their captures
        except CaptureError as error:
            self.graphs.clear()
            _log.error(
                "CUDA graphs cannot be captured here (%s). Steps run operation by operation, which is much slower; "
                "enable_cuda_graphs=false starts without the attempt",
                error,
            )

    def _mixed_shapes(self) -> list[tuple[int, int]]:
        """As `graphs.mixed_shapes`; none where a row's bound costs more than empty tiles: recurrent layers, and
        attention in pieces of fixed positions."""
        if self.model.pool is not None or not self.model.backend.capabilities.shares_work:
            return []
        return mixed_shapes(len(self.model.state.tokens), self._max_tokens, self.model.decode_query_len)

    def submit(self, plan: SchedulerOutput) -> None:
        """As `core.plan.Worker.submit`. Raises `KVWriteError` when the guard is on and finds a breach."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"step {plan.step_id} was submitted with {MAX_STEPS_IN_FLIGHT} steps not collected yet")
        if plan.writable_block_ids is not None and self.mover is not None:
            self.mover.check(plan)
        with step_errors(plan, self.device), torch.inference_mode():
            if self.model.pending is not None:
                # From now on the blocks where it would be written may be another request's.
                for request_id in plan.finished_req_ids:
                    self.model.pending.drop(self.requests.records[request_id].index)
            self.requests.update(plan)
            if plan.new_requests or plan.finished_req_ids:
                self.grammars.update(plan)
            if self.model.pool is not None:
                # What the steps before have yet to write is written first.
                first = len(self.model.state.tokens)
                starts = [(new.snapshot_slot, new.request_id) for new in plan.new_requests]
                self.model.pool.copy(
                    [(first + slot, self.requests.records[name].index) for slot, name in starts if slot is not None]
                )
        parts: list[PartInFlight] = []
        with step_errors(plan, self.device, may_lack_memory=True), torch.inference_mode():
            if self.overlaps and plan.rows:
                parts = [self._run_part(plan, plan.rows)]
            elif plan.rows:
                # Until drafts are accepted; the rest waits for `collect_drafts`.
                rows = plan.rows if plan.budget is None else self._apply_budget(plan.rows, plan.budget)
                of_threads = self.threads.split(rows, self.grammars.answers)
                parts = self.threads.run(lambda rows: self._run_part(plan, rows), of_threads, plan.num_tokens)
        self._in_flight.append(BatchInFlight(plan, parts))

    def reset(self) -> None:
        """As `core.plan.Worker.reset`."""
        self._awaiting_drafts = None
        self._in_flight.clear()
        self.requests.clear()
        if self.model.pending is not None:
            self.model.pending.clear()
        self.grammars.answers.clear()

    def use_drafter(self, drafter: Drafter) -> Drafter:
        """Draft with another drafter, which writes its context KV where the one before did; with no step in flight.
        Returns the drafter that it took the place of. Raises `ValueError` where graphs were captured and the two differ
        in more than their weights."""
        before = self.model.drafter
        assert before is not None
        assert not self._in_flight, "a step is in flight"
        assert self._awaiting_drafts is None, "a step has not drafted"
        with torch.inference_mode():
            self.model.inject_waiting()
        if self.captured:
            exchange_weights(before, drafter)  # a graph reads them where they are
            before, drafter = drafter, before
        self.model.drafter = drafter
        self.model.pending = self.model.ops.pending_context(self.model.state)
        return before

    def collect_results(self) -> ModelRunnerOutput:
        """As `core.plan.Worker.collect_results`."""
        if self._awaiting_drafts is not None:
            self.collect_drafts(())
        self._awaiting_drafts = batch = self._in_flight.popleft()
        results: dict[str, RequestResult] = {}
        mask_seconds = 0.0
        with step_errors(batch.plan, self.device):
            for part in batch.parts:
                assert part.results is not None, "the step before completes this one"
                # Lists, since after a step's products each call of numpy takes some microseconds.
                numbers = part.results.wait().reshape(-1, self.model.state.k + 3).tolist()[: len(part.rows)]
                self.model.target.peers.check()  # a step whose rank is lost ends too, with any numbers
                new_tokens = [
                    ids[: num_accepted + 1] if row.sample else []
                    for row, (num_accepted, _, *ids) in zip(part.rows, numbers, strict=True)
                ]
                logprobs = {} if part.logprobs is None else part.logprobs.entries(new_tokens)
                of_prompt = {} if part.prompt_logprobs is None else part.prompt_logprobs.entries
                answers = {} if part.grammars is None else part.grammars.answers
                for i, (row, new, counts) in enumerate(zip(part.rows, new_tokens, numbers, strict=True)):
                    error: str | None = None
                    status: ErrorStatus = "INTERNAL"
                    if (answer := answers.get(i)) is not None:
                        answer.advance(new)
                        error, status = answer.error, answer.error_status
                    results[row.request_id] = RequestResult(
                        row.request_id, new, counts[0], logprobs.get(i), of_prompt.get(i), error, status, counts[1]
                    )
                if part.grammars is not None:
                    mask_seconds += part.grammars.mask_seconds
        return ModelRunnerOutput(batch.plan.step_id, [results[row.request_id] for row in batch.plan.rows], mask_seconds)

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        """As `core.plan.Worker.collect_drafts`. On a CPU it injects and drafts."""
        batch, self._awaiting_drafts = self._awaiting_drafts, None
        assert batch is not None
        phases: dict[str, float] = {}
        confidences: dict[str, list[float]] = {}
        num_kept: dict[str, int] = {}
        errors: dict[str, tuple[str, ErrorStatus]] = {}
        looked_up: dict[str, int] = {}
        has_confidence = batch.plan.wants_confidence and self.model.wants_confidence and batch.plan.drafts
        with step_errors(batch.plan, self.device), torch.inference_mode():
            if not self.overlaps and batch.parts:
                # Rows of requests that have ended, which the core knows by now, propose nothing.
                for part in batch.parts if ended else ():
                    num_next_draft = part.step.batch.num_next_draft.numpy()  # the numbers that C++ reads
                    num_next_draft[[i for i, row in enumerate(part.rows) if row.request_id in ended]] = 0
                    part.step.traits = replace(part.step.traits, drafts=bool(num_next_draft.any()))
                self.threads.run(self._draft_part, batch.parts, batch.plan.num_tokens, drafts=True)
            for part in batch.parts:
                assert part.draft_report is not None
                seconds, num_looked_up, numbers = self.model.unpacked_report(part.step, part.draft_report.wait())
                looked_up |= zip((row.request_id for row in part.rows), num_looked_up.tolist(), strict=False)
                # Parts run side by side: the phases of the slowest one add up to no more than the step.
                if sum(seconds) > sum(phases.values()):
                    phases = dict(zip(PHASES, seconds, strict=True))
                sure = numbers.tolist() if has_confidence else []
                proposed = None if part.proposed is None else part.proposed.wait()
                for i, row in enumerate(part.rows if sure or part.grammars is not None else ()):
                    values = sure[i][: row.num_next_draft] if sure else []
                    if proposed is not None and part.grammars is not None and (answer := part.grammars.answers.get(i)):
                        drafts = proposed[i, : row.num_next_draft].tolist()
                        kept, values = self._with_grammar(row, answer, drafts, values)
                        if kept is not None:
                            num_kept[row.request_id] = kept
                        if answer.error is not None:
                            errors[row.request_id] = answer.error, answer.error_status
                    confidences[row.request_id] = values
        next_error = self._resume_masked_step(self._in_flight[0]) if self._in_flight else None
        ordered = [confidences.get(row.request_id, []) for row in batch.plan.rows] if has_confidence else []
        return DraftOutput(batch.plan.step_id, ordered, num_kept, errors, phases, next_error, looked_up)

    def _with_grammar(
        self, row: ScheduledRequest, answer: GrammarAnswer, proposed: list[int], confidences: list[float]
    ) -> tuple[int | None, list[float]]:
        """How many drafts the next row of a request with a grammar verifies, None for all, and how sure they are."""
        next_step = self._grammars_in_flight()
        has_next = next_step is not None and next_step.has(answer)
        kept = answer.keep(proposed, has_next)
        if has_next or kept is proposed or answer.error is not None:
            return None, confidences
        num_own = next((i for i, pair in enumerate(zip(kept, proposed, strict=False)) if pair[0] != pair[1]), len(kept))
        if num_own < len(kept):
            if self.grammars.answers.get(row.request_id) is answer:
                first = answer.num_tokens
                index = self.requests.records[row.request_id].index
                self.model.state.tokens[index, first : first + len(kept)] = torch.tensor(kept, device=self.device)
                self.model.state.confidence[index, num_own : len(kept)] = MAX_LOG_ODDS
            # What the grammar has put in place of drafts is certain.
            if confidences:
                confidences = confidences[:num_own] + [MAX_LOG_ODDS] * (len(kept) - num_own)
        return len(kept), confidences

    def _grammars_in_flight(self) -> StepGrammars | None:
        """Those of the step in flight, if there is one with any; on a CPU there never is."""
        return self._in_flight[0].parts[0].grammars if self._in_flight and self._in_flight[0].parts else None

    def _copied_states(self, plan: SchedulerOutput, rows: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
        """The slots of the rows' recurrent states that are copied after the rows, and those that they are copied to."""
        first = len(self.model.state.tokens)
        return [
            (self.requests.records[row.request_id].index, first + slot)
            for row in rows
            if (slot := plan.snapshot_slots.get(row.request_id)) is not None
        ]

    def _apply_budget(self, rows: Sequence[ScheduledRequest], budget: DraftBudget) -> list[ScheduledRequest]:
        """Rows with the drafts that a budget has for them, on a CPU."""
        req_idx = np.array([self.requests.records[row.request_id].index for row in rows])
        num_draft = np.array([row.num_draft for row in rows])
        lens = verified_lens_reference(
            self.model.state.confidence.numpy()[req_idx],
            num_draft,
            budget.weight,
            np.array(budget.offsets, dtype=np.float32),
            np.array(budget.effects, dtype=np.float32),
            budget.num_drafts,
        )
        return [
            row if row.num_draft == num_verified else msgspec.structs.replace(row, num_draft=num_verified)
            for row, num_verified in zip(rows, lens.tolist(), strict=True)
        ]

    def _run_part(self, plan: SchedulerOutput, rows: Sequence[ScheduledRequest]) -> PartInFlight:
        """Queue a step of some of a plan's rows, and the copy of its results; on a CPU verify and accept them. In
        inference mode, which each thread has for itself."""
        budget = plan.budget if self.overlaps else None
        if budget is not None and any(self.requests.records[row.request_id].needs_layout for row in rows):
            rows, budget = evenly_truncated(rows, budget), None
        batch = HostBatch.of(rows, self.requests, budget, plan.wants_confidence, plan.shared_prefixes)
        guard = None if plan.writable_block_ids is None else WriteGuard(plan, rows, self.model.kv.block_size)
        of_prompt, grammars, special = None, None, None
        if self.grammars.answers or self.requests.num_processed:
            of_prompt = PromptLogprobs.of(batch, self.requests)
            grammars = self.grammars.of(batch, self._grammars_in_flight())
            special = SpecialRows.of(batch, self.requests, grammars)
        copies = self._copied_states(plan, rows) if self.model.pool is not None else []
        runner: ForwardRunner = self.model
        padded = self.graphs.find(batch) if self.overlaps and not copies and of_prompt is None else None
        if padded is not None and (guard is None or batch.decode_only):
            self.layouts.send_padded(batch, padded.inputs.num_rows, padded.inputs.num_tokens)
            step = replace(padded.inputs)
            if guard is None:
                runner = padded.runner
        else:
            step = self.model.ops.step_of(batch, self.model.state, self.layouts)
            step.chosen_later = special is not None and special.replaces_all
            step.needs_logits = special is not None
        step = runner.verify(step, guard, of_prompt)
        waits = grammars is not None and grammars.waits
        part = PartInFlight(rows, runner, step, guard, copies, special, of_prompt, grammars, waits)
        if not waits:
            self._after_verify(part)
        return part

    def _after_verify(self, part: PartInFlight) -> None:
        """Queue what follows the target's forward, after a wait for the masks of grammars. On a CPU drafting comes
        later, with `collect_drafts`. Where memory does not suffice, the requests' state is as it was before."""
        if part.special is not None:
            part.special.choose(part.step, self.model.ops)
        if part.special is not None and self.overlaps:
            part.logprobs = part.special.logprobs(part.step, self.model.ops)  # may lack memory: before anything changes
        before = StateSnapshot(self.model.state, part.step) if self.overlaps and part.runner is self.model else None
        try:
            part.runner.accept(part.step)
            results = part.step.results
            part.results = self._results.begin(results.flatten()) if self.overlaps else Download(results, None)
            if self.overlaps:
                self._draft_part(part)
        except torch.OutOfMemoryError:
            if before is not None:
                before.restore()
            raise
        if part.special is not None and not self.overlaps:
            part.logprobs = part.special.logprobs(part.step, self.model.ops)  # of accepted drafts alone

    def _draft_part(self, part: PartInFlight) -> None:
        part.runner.draft(part.step, part.guard, part.copies)
        report = part.step.draft_report
        part.draft_report = self._draft_reports.begin(report) if self.overlaps else Download(report, None)
        if part.grammars is not None:
            part.proposed = fetch(self.model.ops.drafts(part.step.batch, self.model.state))

    def _resume_masked_step(self, step: BatchInFlight) -> StepFailed | StepOutOfMemory | None:
        """Queue what follows the forward of a step that waited for the drafts of the one before. The device runs the
        forward meanwhile, and the masks are filled. Returns why the step cannot go on, if so; it is dropped then."""
        try:
            with step_errors(step.plan, self.device, may_lack_memory=True), torch.inference_mode():
                for part in step.parts:
                    if part.waits and part.grammars is not None:
                        part.waits = False
                        part.grammars.begin()
                        self._after_verify(part)
        except (StepFailed, StepOutOfMemory) as error:
            self._in_flight.remove(step)
            return error
        return None


def evenly_truncated(rows: Sequence[ScheduledRequest], budget: DraftBudget) -> list[ScheduledRequest]:
    """Rows with the same number of drafts each, or fewer where a row has fewer, within a budget."""
    most = budget.num_drafts // max(1, sum(row.num_draft > 0 for row in rows))
    return [msgspec.structs.replace(row, num_draft=min(row.num_draft, most)) for row in rows]


@contextmanager
def step_errors(plan: SchedulerOutput, device: torch.device, may_lack_memory: bool = False) -> Iterator[None]:
    """Turn an error within the block, which runs `plan`, into `StepFailed`. may_lack_memory: where memory lacks, the
    requests' state is as it was, so that is `StepOutOfMemory`, which the core answers otherwise.

    Four kinds pass unchanged: `StepOutOfMemory`; `KVWriteError`, since other requests' KV may be damaged;
    `RankLostError`, since no step can follow; and the error of a GPU whose context is lost, which
    `torch.cuda.synchronize` raises.
    """
    try:
        yield
    except (StepOutOfMemory, KVWriteError, RankLostError):
        raise
    except Exception as error:
        if may_lack_memory and isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            raise StepOutOfMemory(
                f"step {plan.step_id} with {len(plan.rows)} rows and {plan.num_tokens} tokens does not fit the memory "
                f"of {device} ({str(error).partition('.')[0]}); lower max_num_batched_tokens or "
                "gpu_memory_utilization if this comes often"
            ) from None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _log.exception("step %d with the requests %s failed", plan.step_id, [row.request_id for row in plan.rows])
        raise StepFailed(f"{type(error).__name__}: {error}") from error
