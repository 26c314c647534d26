"""Executes step plans on a CPU: verify, accept, inject, draft. Called by the engine core, through `Worker`;
`device_runner` does it on a GPU."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend, RowLayout
from dflash_backend.core.plan import RequestResult, ScheduledRequest, StepPlan, StepResult
from dflash_backend.drafters.base import DraftBlock, Drafter, DraftSampler
from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import PagedContext, TargetModel, TargetOutput
from dflash_backend.worker.acceptance import accept_rows
from dflash_backend.worker.batch import StepBatch, spans
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.request_table import RequestTable
from dflash_backend.worker.row_parallel import RowPool
from dflash_backend.worker.step_errors import step_errors
from dflash_backend.worker.write_guard import WriteGuard

PHASES = ("verify", "accept", "inject", "draft")


@dataclass(frozen=True)
class Outcome:
    """What the accept phase decided, on the host, int64 `[num_rows]` in the batch's order.

    num_accepted: drafts that stand. num_final: positions of the row whose K/V is final, `num_new + num_accepted`.
    tokens and logprobs are as in `RequestResult`.
    """

    num_accepted: np.ndarray
    num_final: np.ndarray
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]


@dataclass(frozen=True)
class PartResult:
    """What one part of a step's rows yielded, and how long each phase took in seconds."""

    rows: list[RequestResult]
    phase_seconds: dict[str, float]


class ModelRunner:
    """Owns models, K/V and request table. `submit` runs a step to its end, since a CPU has nothing to
    overlap it with."""

    overlaps = False

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        kv: PagedKVCache,
        backend: AttentionBackend,
        requests: RequestTable,
        greedy_drafts: bool,
        device: torch.device,
        dtype: torch.dtype,
        num_row_workers: int = 1,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.kv = kv
        self.backend = backend
        self.requests = requests
        self.greedy_drafts = greedy_drafts
        self.device = device
        self.dtype = dtype
        self.rows = RowPool(num_row_workers)
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See `core.plan.Worker`. Raises `KVWriteError` when the guard is on and finds a breach."""
        with step_errors(plan, self.device):
            self._results.append(self._run(plan))

    def reset(self) -> None:
        """See `core.plan.Worker`."""
        self.requests.clear()

    def collect(self) -> StepResult:
        """See `core.plan.Worker`."""
        return self._results.popleft()

    def _run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.finished_req_ids:
            self.requests.forget(request_id)
        for new in plan.new_requests:
            self.requests.learn(new)
        if not plan.rows:
            return StepResult(plan.step_id, [])
        for row in plan.rows:
            self.requests.append_blocks(row)
        guard = WriteGuard(plan, self.kv.block_size)
        parts = self.rows.run(lambda rows: self._run_part(rows, guard), self.rows.split(plan.rows))

        results = {result.request_id: result for part in parts for result in part.rows}
        # Parts run side by side: those of the slowest one add up to no more than the step.
        phases = max((part.phase_seconds for part in parts), key=lambda seconds: sum(seconds.values()))
        return StepResult(plan.step_id, [results[row.request_id] for row in plan.rows], phases)

    @torch.inference_mode()
    def _run_part(self, rows: list[ScheduledRequest], guard: WriteGuard) -> PartResult:
        """All phases for some of a step's rows."""
        batch = StepBatch.build(rows, self.requests, self.kv.block_size)
        clock = [time.perf_counter()]
        output = self._verify(batch, guard)
        clock.append(time.perf_counter())
        outcome = self._accept(batch, output)
        clock.append(time.perf_counter())
        if self.drafter is not None and output.features is not None:
            self._inject(self.drafter, batch, outcome, output.features, guard)
        clock.append(time.perf_counter())
        if self.drafter is not None and batch.num_next_draft.any():
            self._draft(self.drafter, batch, outcome, guard)
        clock.append(time.perf_counter())
        results = [
            RequestResult(row.request_id, outcome.tokens[i], int(outcome.num_accepted[i]), outcome.logprobs[i])
            for i, row in enumerate(batch.rows)
        ]
        return PartResult(results, dict(zip(PHASES, np.diff(clock).tolist(), strict=True)))

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _verify(self, batch: StepBatch, guard: WriteGuard) -> TargetOutput:
        """One target forward over all rows."""
        guard.check("verify", batch.request_ids, batch.token_row, batch.token_slot)
        seq_lens = batch.start + batch.num_new + batch.num_draft
        all_rows = np.arange(len(batch.rows))
        layout = RowLayout(
            query_lens=batch.num_new + batch.num_draft,
            seq_lens=seq_lens,
            block_tables=self._put(batch.block_tables(all_rows, int(seq_lens.max()))),
        )
        positions = self._put(batch.token_position)
        context = PagedContext.prepare(
            layout, positions, self._put(batch.token_slot), self.backend, self.target.patterns, self.dtype
        )
        tokens = self.requests.tokens[self._put(batch.table[batch.token_row]), positions]
        capture = self.drafter.capture if self.drafter is not None else ()
        return self.target.forward(tokens, context, self.kv.target, capture)

    def _accept(self, batch: StepBatch, output: TargetOutput) -> Outcome:
        """Decide the new tokens of the rows that sample and put them into the request table."""
        num_accepted = np.zeros(len(batch.rows), dtype=np.int64)
        tokens: list[list[int]] = [[] for _ in batch.rows]
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(batch.rows)
        greedy = np.array([self.requests.records[request_id].sampling.greedy for request_id in batch.request_ids])
        for is_greedy, kind in ((True, greedy), (False, ~greedy)):
            rows = (batch.sample & kind).nonzero()[0]
            if len(rows) == 0:
                continue
            accepted = accept_rows(
                batch, rows, output.hidden, self.target, self.requests, is_greedy, self.greedy_drafts
            )
            num_accepted[rows] = accepted.num_accepted
            for i, row in enumerate(rows.tolist()):
                tokens[row], logprobs[row] = accepted.tokens[i], accepted.logprobs[i]
        return Outcome(num_accepted, batch.num_new + num_accepted, tokens, logprobs)

    def _inject(
        self, drafter: Drafter, batch: StepBatch, outcome: Outcome, features: torch.Tensor, guard: WriteGuard
    ) -> None:
        """Context K/V of the positions that are final now; rejected ones write nothing (trap 3)."""
        final = batch.token_position < (batch.start + outcome.num_final)[batch.token_row]
        positions, slots = batch.token_position, batch.token_slot
        if not final.all():
            features = features[self._put(final.nonzero()[0])]
            positions, slots = positions[final], slots[final]
        guard.check("inject", batch.request_ids, batch.token_row[final], slots)
        drafter.inject(features, self._put(positions), self._put(slots))

    def _draft(self, drafter: Drafter, batch: StepBatch, outcome: Outcome, guard: WriteGuard) -> None:
        """Propose the next step's drafts and leave them in the request table, behind the anchor."""
        rows = batch.num_next_draft.nonzero()[0]
        num_draft = batch.num_next_draft[rows]
        anchors = batch.start[rows] + outcome.num_final[rows]
        block_rows, block_positions = spans(anchors, num_draft + 1)
        slots = batch.slots(rows[block_rows], block_positions)
        guard.check("draft", [batch.request_ids[row] for row in rows], block_rows, slots)

        table = self._put(batch.table[rows])
        width = int((anchors + num_draft).max()) + 1
        block = DraftBlock(
            anchors=self.requests.tokens[table, self._put(anchors)],
            positions=anchors,
            num_draft=num_draft,
            block_tables=self._put(batch.block_tables(rows, width)),
            slots=self._put(slots),
        )
        sampler = self._draft_sampler(batch, rows)
        drafts = drafter.propose(block, sampler)

        is_draft = block_positions > anchors[block_rows]
        draft_rows, positions = block_rows[is_draft], block_positions[is_draft]
        draft_table = batch.table[rows[draft_rows]]
        self.requests.tokens[self._put(draft_table), self._put(positions)] = drafts
        if sampler.probs is not None:
            flat = sampler.sampled_flat
            columns = (positions - anchors[draft_rows] - 1)[flat]
            self.requests.draft_probs[self._put(draft_table[flat]), self._put(columns)] = sampler.probs

    def _draft_sampler(self, batch: StepBatch, rows: np.ndarray) -> DraftSampler:
        """Sampled requests draw their drafts, unless the server asks for greedy ones."""
        records = [self.requests.records[batch.request_ids[row]] for row in rows]
        sampled = np.array([not record.sampling.greedy for record in records]).nonzero()[0]
        if self.greedy_drafts or len(sampled) == 0:
            return DraftSampler(None, sampled[:0])
        return DraftSampler(self.requests.sampling_rows(batch.table[rows[sampled]]), sampled)
