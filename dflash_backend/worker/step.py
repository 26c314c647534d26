"""One step: verify, accept, inject, draft, each a verb over one `ForwardBatch`.

Without a guard nothing here looks at a value, so the same code runs eagerly and is captured in graphs. `verify` leaves
the requests' state as it is, the others advance it. A step's tokens are there after `accept`. `draft` injects first:
nothing comes between the two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.drafters.base import ContextBatch, DraftBatch, Drafter
from dflash_backend.drafters.ngram.drafter import NgramDrafter
from dflash_backend.error_text import first_line
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.models.recurrent_state import StateLayout, StatePool, StateRows
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.kv_cache import PagedKVCache, WriteGuard
from dflash_backend.worker.logits import PromptLogprobs
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import PendingContext, StepOps
from dflash_kernels import timestamp

PHASES = ("verify", "accept", "inject", "draft")
# Recorded as the step begins and as verify and accept end, then as inject begins and as inject and draft end.
NUM_TIMESTAMPS = 6
StateCopies = Sequence[tuple[int, int]]


@dataclass
class SpecDecodeModel:
    """The models, the KV, the requests' state and the operations that steps are made of.

    draft_temperature_ratio: drafts are chosen at this times the request's temperature. dtype: that of models and KV.
    wants_confidence: whether the drafter says how sure it is of its drafts. draft_backend: what runs the drafter's
    attention, None where `backend` does. pool: the states of recurrent layers, in the slots of the requests' indices;
    None where the target has none. shares_prefixes: whether plans may have rows that read a prefix together. lookup:
    prompt lookup beside the drafter, whose block a row may verify in place of the drafter's.
    """

    target: TargetModel
    drafter: Drafter | None
    kv: PagedKVCache
    backend: AttentionBackend
    ops: StepOps
    state: StateTensors
    draft_temperature_ratio: float
    dtype: torch.dtype
    wants_confidence: bool = False
    draft_backend: AttentionBackend | None = None
    pool: StatePool | None = None
    shares_prefixes: bool = False
    lookup: NgramDrafter | None = None
    pending: PendingContext | None = field(init=False, default=None)
    """Where context waits until it is needed, on a CPU."""

    def __post_init__(self) -> None:
        if self.drafter is not None:
            self.pending = self.ops.pending_context(self.state)
        self.device = self.state.tokens.device
        self.decode_query_len = self.state.k + 1
        """Tokens of a decode row: the last known one and k drafts."""

    def run(self, step: ForwardBatch) -> ForwardBatch:
        """A whole step."""
        self.verify(step)
        self.accept(step)
        self.draft(step)
        return step

    def verify(
        self, step: ForwardBatch, guard: WriteGuard | None = None, prompt_logprobs: PromptLogprobs | None = None
    ) -> ForwardBatch:
        """One target forward over all rows, and the tokens that their drafts are compared with; the same `step`."""
        on_host, size = self.ops.on_host, NUM_TIMESTAMPS
        step.timestamps = (
            np.zeros(size, np.int64) if on_host else torch.zeros(size, dtype=torch.int64, device=self.device)
        )
        record(step.timestamps, 0)
        if step.budget is not None:
            self.ops.apply_budget(step, step.budget, self.state)
        if not step.prepared:
            self.ops.prepare(step, self.state)
        if guard is not None:
            guard.check("verify", step.batch.token_row, step.slots, step.batch.query_lens)
            if step.windows is not None:
                guard.check_windows(step.batch.token_row, step.windows.slots)
        if self.pool is not None:
            batch, lens = step.batch, step.attention.query_lens
            step.states = StateRows.of(
                self.pool,
                StateLayout(batch.req_idx, step.starts, batch.query_start, batch.query_lens, lens, step.num_tokens),
            )
            if guard is not None:
                step.states.check()
        context = PagedContext(
            step.attention, step.positions, step.slots, self.backend, self.dtype, step.padded, step.states, step.windows
        )
        if step.traits.adapted:
            context.adapter_ids = self.ops.adapter_ids(step, self.state)
        capture = self.drafter.capture if self.drafter is not None else ()
        output = self.target.forward(step.token_ids, context, self.kv.target, capture)
        hidden, step.features = output.hidden, output.features
        if prompt_logprobs is not None:
            prompt_logprobs.compute(hidden, self.target, self.state.tokens, self.ops)
        tokens = None
        if step.traits.chooses:
            if step.logits_token is not None:
                hidden = hidden.index_select(0, step.logits_token)
            if not step.needs_logits and self.target.coarse_head is not None:
                tokens = self.ops.tokens_without_logits(step, self.state, self.target, hidden)
            step.logits = self.target.logits(hidden) if tokens is None else None
        step.target_tokens = self.ops.target_tokens(step, self.state) if tokens is None else tokens
        record(step.timestamps, 1)
        return step

    def accept(self, step: ForwardBatch) -> None:
        """Which drafts are the target's own tokens, and which token follows them."""
        self.ops.accept(step, self.state)
        record(step.timestamps, 2)

    def inject(self, step: ForwardBatch, guard: WriteGuard | None = None) -> None:
        """Write the drafter's context KV of positions that are final."""
        record(step.timestamps, 3)
        drafter, features, context = self.drafter, step.features, None
        if drafter is not None and features is not None:
            context = self.ops.context(step, self.state, features, self.pending)
        if drafter is not None and context is not None:
            assert context.token_row is not None
            if guard is not None:
                guard.check("inject", context.token_row, context.slots)
            if drafter.reads_next_tokens:
                req_idx = step.batch.req_idx[context.token_row.clamp(min=0).long()].clamp(min=0).long()
                context = self._with_next_tokens(context, req_idx)
            drafter.inject(context)
        record(step.timestamps, 4)

    def inject_waiting(self) -> None:
        """Write the context KV that waits, as after a step in which all of it is needed."""
        drafter = self.drafter
        if self.pending is None or drafter is None or (context := self.pending.take_all()) is None:
            return
        if drafter.reads_next_tokens:
            assert context.token_row is not None
            context = self._with_next_tokens(context, context.token_row.long())
        drafter.inject(context)

    def _with_next_tokens(self, context: ContextBatch, req_idx: torch.Tensor) -> ContextBatch:
        """The context with the token behind each position. req_idx: int64 `[n]`, the request of each token."""
        return replace(context, next_token_ids=self.state.tokens[req_idx, context.positions + 1])

    def draft(self, step: ForwardBatch, guard: WriteGuard | None = None, copies: StateCopies = ()) -> None:
        """Inject, propose the next step's drafts and leave them in the state, after the anchor. Then bring the states
        of recurrent layers to the accepted drafts: they come last, so that what fails before leaves them as they were.
        copies: slots of recurrent states that are copied after that, and where to."""
        self.inject(step, guard)
        batch, state, drafter = step.batch, self.state, self.drafter
        asked = self.wants_confidence and step.traits.wants_confidence
        if drafter is not None and step.traits.drafts:
            queries, before = None, None
            if drafter.placeholder_id is not None:
                lookahead_base = drafter.lookahead_base or 0
                queries = self.ops.prepare_draft(step, state, drafter.placeholder_id, lookahead_base)
                if guard is not None:
                    guard.check_draft(queries, batch.num_next_draft, lookahead_base)
            if drafter.reads_next_tokens and step.features is not None:
                before = self.ops.features_before_anchors(step, step.features)
            draft = DraftBatch(
                state.tokens, state.computed, batch.req_idx, batch.num_next_draft, step.draft_width, queries, before
            )
            sampler = self.ops.draft_sampler(step, state, self.draft_temperature_ratio, asked)
            self.ops.store_drafts(drafter.propose(draft, sampler), batch, state)
            if self.lookup is not None:
                found, num_found = self.lookup.propose_matched(draft, asked)
                step.num_looked_up = self.ops.choose_drafts(step, state, found.token_ids, num_found)
                self.ops.store_drafts(found, batch, state, step.num_looked_up)
        if step.states is not None:
            self._commit(step.states, batch.num_new + step.num_accepted.int(), copies)
        record(step.timestamps, 5)
        step.draft_report = torch.as_tensor(step.timestamps)
        if step.num_looked_up is not None:
            step.draft_report = torch.cat([step.draft_report, step.num_looked_up.long()])
        # A captured step has the same numbers each time.
        if (asked and step.traits.drafts) or not self.ops.on_host:
            confidence = state.confidence.index_select(0, batch.req_idx.clamp(min=0))
            step.draft_report = torch.cat([step.draft_report, confidence.view(torch.int32).flatten().long()])

    @staticmethod
    def _commit(states: StateRows, num_kept: torch.Tensor, copies: StateCopies) -> None:
        """Raises `RuntimeError` where memory does not suffice: some states may be ahead of others then, so the step
        must not be tried again, and its requests are computed anew."""
        try:
            states.commit(num_kept)
            states.pool.copy(copies)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"no memory to bring recurrent states up to date: {first_line(error)}") from None

    def result_sizes(self, num_rows: int) -> tuple[int, int]:
        """Numbers in `ForwardBatch.results` and `ForwardBatch.draft_report` of that many rows, padding included."""
        of_row = self.state.k + (self.lookup is not None)
        return num_rows * (self.state.k + 3), NUM_TIMESTAMPS + num_rows * of_row

    def unpacked_report(self, step: ForwardBatch, numbers: np.ndarray) -> tuple[list[float], np.ndarray, np.ndarray]:
        """The parts of `step.draft_report` on the host: seconds of each of `PHASES`; how many of its next drafts each
        row looked up, int64 `[R]`, none where nothing is; and confidences, float32 `[R, k]`, none of a step on a CPU
        that drafts nothing."""
        times = numbers[:NUM_TIMESTAMPS].tolist()
        seconds = [(times[end] - times[end - 1]) / 1e9 for end in (1, 2, 4, 5)]
        num_header = NUM_TIMESTAMPS + (0 if step.num_looked_up is None else step.num_rows)
        looked_up, sure = numbers[NUM_TIMESTAMPS:num_header], numbers[num_header:]
        if not len(sure):
            return seconds, looked_up, np.empty((0, 0), np.float32)
        return seconds, looked_up, sure.astype(np.int32).view(np.float32).reshape(-1, max(1, self.state.k))


def record(timestamps: torch.Tensor | np.ndarray, index: int) -> None:
    """Set `timestamps[index]` (int64, ns) when everything that was queued before has run.

    A time that the device writes down among its other work needs no event of the host's, works within a captured graph,
    and stays that step's own while the next one is queued, which events in a graph would not. Differences count: on a
    CPU the times are the host's.
    """
    if isinstance(timestamps, torch.Tensor) and timestamps.is_cuda:
        timestamp.timestamp(timestamps, index)
    else:
        timestamps[index] = time.perf_counter_ns()
