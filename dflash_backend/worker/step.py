"""One step: verify, accept, inject, draft, as functions of tensors.

Without a guard and logits processors nothing here looks at a value, so the same code runs eagerly and is captured in
graphs. `verify` leaves the requests' state as it is, `finish` advances it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.drafters.base import ContextBatch, DraftBatch, Drafter
from dflash_backend.error_text import first_line
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.models.recurrent_state import StateLayout, StatePool, StateRows
from dflash_backend.worker.batch import DeviceBatch, StepInputs
from dflash_backend.worker.grammars import StepGrammars
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.logits import LogitsProcessors, PendingLogprobs, PromptLogprobs
from dflash_backend.worker.pending_context import Context, PendingContext
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import Accepted, Prepared, StepOps, ended_rows
from dflash_backend.worker.write_guard import WriteGuard
from dflash_kernels import timestamp

PHASES = ("verify", "accept", "inject", "draft")
# Recorded as the step begins, and as each of its phases ends.
NUM_TIMESTAMPS = len(PHASES) + 1
Slots = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Forwarded:
    """What the target's forward gave, in the step as it is laid out: `inputs`. features: `[T, L * hidden]`. logits:
    `[D, vocab]`, None where no row chooses tokens. timestamps, states: as of `Verified`."""

    inputs: StepInputs
    prepared: Prepared
    features: torch.Tensor | None
    logits: torch.Tensor | None
    timestamps: torch.Tensor
    states: StateRows | None = None


@dataclass(frozen=True)
class Verified:
    """What `verify` found, in the step as it is laid out: `inputs`. features: `[T, L * hidden]`. target_tokens: int64
    `[D]`, the target's own token for each row of logits. timestamps: int64 `[NUM_TIMESTAMPS]`, in ns. states: what the
    forward kept for the states of recurrent layers; None where there are none."""

    inputs: StepInputs
    prepared: Prepared
    features: torch.Tensor | None
    target_tokens: torch.Tensor
    timestamps: torch.Tensor
    states: StateRows | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a step yields. numbers: int64 `[result_size]`, on the device: the accepted drafts of each row, the verified
    ones, its new tokens, k + 1 of them with 0 behind the last, how sure the drafter is of the drafts that it proposed,
    k of each row (the bits of float32), then the timestamps and, where they were asked for, the k drafts of each row,
    with anything behind the last. logprobs: of the rows that asked; None where none did."""

    numbers: torch.Tensor
    logprobs: PendingLogprobs | None = None


class StepNumbers(NamedTuple):
    """The parts of `StepOutput.numbers` on the host, of R rows: accepted and verified drafts and k + 1 tokens of each
    row, the timestamps, then, as arrays, confidences float32 `[R, k]`, and drafts int64 `[R, k]`, or `[R, 0]` where
    they were not asked for. Lists, since after a step's products each call of numpy takes some microseconds."""

    accepted: list[int]
    verified: list[int]
    tokens: list[list[int]]
    times: list[int]
    confidences: np.ndarray
    drafts: np.ndarray


@dataclass
class ModelStep:
    """The models, the KV, the requests' state and the operations that steps are made of.

    draft_temperature_ratio: drafts are chosen at this times the request's temperature. dtype: that of models and KV.
    wants_confidence: whether the drafter says how sure it is of its drafts. draft_backend: what runs the drafter's
    attention, None where `backend` does. pool: the states of recurrent layers, in the slots of the requests' indices;
    None where the target has none. shares_prefixes: whether plans may have rows that read a prefix together.
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
    pending: PendingContext | None = field(init=False, default=None)
    """Where context may wait; not on a device, where injection is a small part of a step of one shape."""

    def __post_init__(self) -> None:
        if self.ops.on_host and self.drafter is not None:
            self.pending = PendingContext(len(self.state.tokens), self.state.block_size)

    @property
    def device(self) -> torch.device:
        """Where steps run."""
        return self.state.tokens.device

    @property
    def width(self) -> int:
        """Tokens of a decode row: the last known one and k drafts."""
        return self.state.k + 1

    def result_size(self, num_rows: int) -> int:
        """Numbers in the result of a step with that many rows, padding rows included, at most."""
        return num_rows * (3 * self.state.k + 3) + NUM_TIMESTAMPS

    def run(
        self,
        inputs: StepInputs,
        guard: WriteGuard | None = None,
        processors: LogitsProcessors | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        grammars: StepGrammars | None = None,
        copies: Slots = (),
    ) -> StepOutput:
        """A whole step. copies: slots of recurrent states that are copied behind it, and where to. Raises
        `torch.OutOfMemoryError`, and has changed nothing of the requests' state then."""
        forwarded = self.forward(inputs, guard, processors, prompt_logprobs)
        return self.complete(forwarded, guard, processors, grammars, copies)

    def complete(
        self,
        forwarded: Forwarded,
        guard: WriteGuard | None = None,
        processors: LogitsProcessors | None = None,
        grammars: StepGrammars | None = None,
        copies: Slots = (),
    ) -> StepOutput:
        """What follows the target's forward; waits for the masks of grammars. Raises as `run`."""
        return self.settle(self.choose(forwarded, grammars), guard, processors, grammars is not None, copies)

    def settle(
        self,
        verified: Verified,
        guard: WriteGuard | None = None,
        processors: LogitsProcessors | None = None,
        returns_drafts: bool = False,
        copies: Slots = (),
    ) -> StepOutput:
        """As `finish`, and where that runs out of memory the requests' state is as it was before. Raises as `run`."""
        if self.ops.on_host:  # a CPU never raises this error
            return self.finish(verified, guard, processors, returns_drafts, copies)
        before = StateSnapshot(self.state, verified.inputs.batch, verified.prepared)
        try:
            return self.finish(verified, guard, processors, returns_drafts, copies)
        except torch.OutOfMemoryError:
            before.restore()
            raise

    def unpacked(self, numbers: np.ndarray, num_rows: int) -> StepNumbers:
        """The parts of `StepOutput.numbers`, on the host."""
        width, of_tokens = self.width, num_rows * (2 + self.width)
        behind = of_tokens + num_rows * self.state.k
        counts = numbers[:of_tokens].tolist()
        tokens = [counts[first : first + width] for first in range(2 * num_rows, of_tokens, width)]
        end = behind + NUM_TIMESTAMPS
        confidences = numbers[of_tokens:behind].astype(np.int32).view(np.float32).reshape(num_rows, -1)
        drafts = numbers[end:].reshape(num_rows, -1)
        times = numbers[behind:end].tolist()
        return StepNumbers(counts[:num_rows], counts[num_rows : 2 * num_rows], tokens, times, confidences, drafts)

    def verify(self, inputs: StepInputs) -> Verified:
        """One target forward over all rows, and the tokens that their drafts are compared with."""
        return self.choose(self.forward(inputs))

    def forward(
        self,
        inputs: StepInputs,
        guard: WriteGuard | None = None,
        processors: LogitsProcessors | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Forwarded:
        """One target forward over all rows, up to the logits that tokens are chosen from, but for grammars."""
        timestamps = torch.zeros(NUM_TIMESTAMPS, dtype=torch.int64, device=self.device)
        record(timestamps, 0)
        inputs = self.ops.lay_out(inputs, self.state)
        prepared = self.ops.prepare(inputs, self.state)
        if guard is not None:
            guard.check("verify", inputs.batch.token_row, prepared.slots, inputs.batch.query_lens)
            if prepared.windows is not None:
                guard.check_windows(inputs.batch.token_row, prepared.windows.slots)
        context = PagedContext.prepare(
            prepared.layout,
            prepared.positions,
            prepared.slots,
            self.backend,
            self.target.patterns,
            self.dtype,
            prepared.padded,
            states := self._states(inputs, prepared, guard),
            prepared.windows,
        )
        capture = self.drafter.capture if self.drafter is not None else ()
        output = self.target.forward(prepared.token_ids, context, self.kv.target, capture)
        hidden = output.hidden
        if prompt_logprobs is not None:
            prompt_logprobs.compute(hidden, self.target, self.state.tokens)
        logits = None
        if inputs.traits.chooses:
            if inputs.logits_token is not None:
                hidden = hidden.index_select(0, inputs.logits_token)
            logits = self.target.logits(hidden)
            if processors is not None:
                logits = processors.apply(logits, self.ops)
        return Forwarded(inputs, prepared, output.features, logits, timestamps, states)

    def _states(self, inputs: StepInputs, prepared: Prepared, guard: WriteGuard | None) -> StateRows | None:
        """The rows as recurrent layers see them. Raises `RuntimeError` when there is a guard and a row starts elsewhere
        than its state ends."""
        if self.pool is None:
            return None
        batch, lens = inputs.batch, inputs.bounds.query_lens
        own = StateLayout(batch.req_idx, prepared.starts, batch.query_start, batch.query_lens, lens, inputs.num_tokens)
        rows = StateRows.of(self.pool, own)
        if guard is not None:
            rows.check()
        return rows

    def choose(self, forwarded: Forwarded, grammars: StepGrammars | None = None) -> Verified:
        """The tokens that drafts are compared with, among those that grammars allow."""
        inputs, prepared, logits = forwarded.inputs, forwarded.prepared, forwarded.logits
        if logits is None:
            target_tokens = torch.zeros(len(inputs.logits_row), dtype=torch.int64, device=self.device)
        else:
            if grammars is not None and (masks := grammars.masks()) is not None:
                self.ops.apply_token_bitmask(logits, *masks)
            target_tokens = self.ops.target_tokens(logits, inputs, prepared, self.state)
            if grammars is not None and (missing := grammars.missing_masks(target_tokens)) is not None:
                self.ops.apply_token_bitmask(logits, *missing)
                target_tokens = self.ops.target_tokens(logits, inputs, prepared, self.state)
        record(forwarded.timestamps, 1)
        return Verified(inputs, prepared, forwarded.features, target_tokens, forwarded.timestamps, forwarded.states)

    def finish(
        self,
        verified: Verified,
        guard: WriteGuard | None = None,
        processors: LogitsProcessors | None = None,
        returns_drafts: bool = False,
        copies: Slots = (),
    ) -> StepOutput:
        """Accept, inject and draft; then bring the states of recurrent layers behind the accepted drafts. They come
        last, so that what fails before leaves them as they were."""
        inputs, prepared, timestamps = verified.inputs, verified.prepared, verified.timestamps
        accepted = self.ops.accept(verified.target_tokens, inputs.batch, prepared, self.state)
        logprobs = None
        if processors is not None:
            logprobs = processors.logprobs(verified.target_tokens, accepted.count if self.ops.on_host else None)
        record(timestamps, 2)
        if self.drafter is not None and verified.features is not None:
            self._inject(self.drafter, inputs.batch, prepared, verified.features, guard)
        record(timestamps, 3)
        if self.drafter is not None and inputs.traits.drafts:
            self._draft(self.drafter, inputs, verified.features, accepted, guard)
        if verified.states is not None:
            self._commit(verified.states, inputs.batch.num_new + accepted.count, copies)
        record(timestamps, 4)
        confidence = self.state.confidence.index_select(0, inputs.batch.req_idx.clamp(min=0))
        counts = [accepted.count, inputs.batch.num_draft]
        numbers = [*counts, accepted.tokens.flatten(), confidence.view(torch.int32).flatten(), timestamps]
        output = StepOutput(torch.cat([each.long() for each in numbers]), logprobs)
        return self.with_drafts(output, inputs.batch) if returns_drafts else output

    def with_drafts(self, output: StepOutput, batch: DeviceBatch) -> StepOutput:
        """The output of a step with the drafts that its rows propose."""
        return replace(output, numbers=torch.cat([output.numbers, self.ops.drafts(batch, self.state).flatten()]))

    @staticmethod
    def _commit(states: StateRows, num_kept: torch.Tensor, copies: Slots) -> None:
        """Raises `RuntimeError` where memory does not suffice: some states may be ahead of others then, so the step
        must not be tried again, and its requests are computed anew."""
        try:
            states.commit(num_kept)
            states.pool.copy(copies)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"no memory to bring recurrent states up to date: {first_line(error)}") from None

    def _inject(
        self,
        drafter: Drafter,
        batch: DeviceBatch,
        prepared: Prepared,
        features: torch.Tensor,
        guard: WriteGuard | None,
    ) -> None:
        """Write the drafter's context KV of positions that are final."""
        if self.pending is not None and self.pending.keep_step(features, batch, prepared, self.state):
            return
        final = self.ops.final_tokens(batch, prepared, self.state)
        token_row = batch.token_row
        if final.index is not None:
            features, token_row = features[final.index], token_row[final.index]
        context = Context(features, token_row, final)
        if self.pending is not None:
            context = self.pending.exchange(context, batch, self.state)
            if not len(context.token_row):
                return
        final = context.final
        if guard is not None:
            guard.check("inject", context.token_row, final.slots)
        next_tokens = None
        if drafter.reads_next_tokens:
            req_idx = batch.req_idx[context.token_row.clamp(min=0).long()].clamp(min=0).long()
            next_tokens = self.state.tokens[req_idx, final.positions + 1]
        drafter.inject(ContextBatch(context.features, final.positions, final.slots, final.padded, next_tokens))

    def _draft(
        self,
        drafter: Drafter,
        inputs: StepInputs,
        features: torch.Tensor | None,
        accepted: Accepted,
        guard: WriteGuard | None,
    ) -> None:
        """Propose the next step's drafts and leave them in the state, behind the anchor."""
        ended = ended_rows(inputs.batch.req_idx, accepted, self.state, inputs.drafting)
        if (left := inputs.without_drafts(ended)) is None:
            return
        inputs = left
        queries, before = None, None
        if drafter.placeholder_id is not None:
            lookahead_base = drafter.lookahead_base or 0
            queries = self.ops.prepare_draft(inputs, self.state, drafter.placeholder_id, lookahead_base)
            if guard is not None:
                guard.check_draft(queries, inputs.batch.num_next, lookahead_base)
        if drafter.reads_next_tokens and features is not None:
            before = self.ops.features_before_anchors(features, inputs.batch, accepted.count)
        draft = DraftBatch(self.ops.history(inputs, self.state), queries, before)
        asked = self.wants_confidence and inputs.traits.wants_confidence
        sampler = self.ops.draft_sampler(inputs, self.state, self.draft_temperature_ratio, asked)
        self.ops.store_drafts(drafter.propose(draft, sampler), inputs.batch, self.state)


class StateSnapshot:
    """What `ModelStep.finish` changes of the requests' state, as it was before: for a step that fails midway.

    KV needs no such care: a step that failed wrote no final positions, and the next one writes those again.
    """

    def __init__(self, state: StateTensors, batch: DeviceBatch, prepared: Prepared) -> None:
        self._state = state
        # The token after the accepted drafts, at most k of them, then the next k drafts.
        first = (prepared.starts + batch.num_new).long()
        columns = torch.arange(2 * state.k + 1, device=first.device)
        self._positions = (first[:, None] + columns).clamp(max=state.max_len - 1)
        # Padding rows are taken for request 0; restoring them rewrites the values already there.
        self._index = batch.req_idx.clamp(min=0).long()
        self._tokens = state.tokens[self._index[:, None], self._positions]
        self._computed = state.computed[self._index]

    def restore(self) -> None:
        """Put everything back."""
        self._state.tokens[self._index[:, None], self._positions] = self._tokens
        self._state.computed[self._index] = self._computed


def record(timestamps: torch.Tensor, index: int) -> None:
    """Set `timestamps[index]` (int64, ns) when everything that was queued before has run.

    A time that the device writes down among its other work needs no event of the host's, works within a captured graph,
    and stays that step's own while the next one is queued, which events in a graph would not. Differences count: on a
    CPU the times are the host's.
    """
    if timestamps.is_cuda:
        timestamp.timestamp(timestamps, index)
    else:
        timestamps.numpy()[index] = time.perf_counter_ns()
