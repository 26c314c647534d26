"""The operations of a step on the requests' state: prepare, sample, accept, draft. `dflash_kernels` says beside each
kernel what it computes.

`CpuStepOps` is the form of a CPU: C++, or the kernels' references, on exact lengths, so that nothing is padded.
`PaddedStepOps` is the form of a GPU by the references, for tests, and `GpuStepOps` the same by kernels: none of them
waits for the device or has a shape that depends on a value, so they can be captured in a graph; rows are padded, and
the host knows bounds of their lengths.

On a CPU a request that does not draft needs its context KV only when a block is full, or when it drafts, and injecting
one token costs nearly as much as injecting sixteen, since the operations are small. So `PendingContext` keeps the
features of such a request until its tokens fill a block, which the prefix cache may then publish (PUBLISH), or until it
drafts again; then they go to the drafter together. A request keeps less than a block. Without operations in C++
nothing waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch, DeviceLengths
from dflash_backend.drafters.base import ContextBatch, DraftQueries, Drafts, DraftSampler
from dflash_backend.models.interface import TargetModel
from dflash_backend.worker.batch import (
    CpuBatch,
    DeviceBatch,
    ForwardBatch,
    HostBatch,
    LayoutBuffer,
    exact_layout,
    window_slots,
)
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.transfers import share
from dflash_kernels import (
    accept,
    argmax,
    cpu_ops,
    cpu_step,
    draft_choice,
    log_odds,
    logits_filter,
    logprobs,
    penalties,
    prepare_draft,
    prepare_step,
    sample,
    token_bitmask,
    verify_budget,
)
from dflash_kernels.dispatch import use_triton

# With more rows some of them fill a block in nearly every step, and to keep the others back takes as long as it saves.
MAX_WAITING_ROWS = 16


class PendingContext:
    """The features that wait, by request index. The parts of a step may use it side by side: no two have a request in
    common.

    What waits of a request lies in one block: consecutive positions and slots, of which the first are known.
    """

    def __init__(self, num_requests: int, block_size: int) -> None:
        self._num_requests, self._block_size = num_requests, block_size
        self._waiting: cpu_step.WaitingContext | None = None  # once the width of features is known
        self._lock = threading.Lock()

    def num_waiting(self, req_idx: int) -> int:
        """Tokens of a request that wait."""
        return 0 if self._waiting is None else self._waiting.counts.item(req_idx)

    def drop(self, req_idx: int) -> None:
        """Drop what waits of a request: it has ended, or is preempted."""
        if self._waiting is not None:
            self._waiting.counts[req_idx] = 0

    def clear(self) -> None:
        """Drop everything."""
        if self._waiting is not None:
            self._waiting.counts[:] = 0

    def take(
        self, step: ForwardBatch, batch: CpuBatch, features: torch.Tensor, state: StateTensors
    ) -> ContextBatch | None:
        """The context of a step that is written now, after `accept`: the tokens whose positions are final, without
        those that can wait, and what has waited and is needed now. None where there is nothing to write."""
        features = features.contiguous()
        if self._waiting is None:
            with self._lock:
                if self._waiting is None:
                    self._waiting = cpu_step.WaitingContext(self._num_requests, self._block_size, features)
        found = cpu_step.take_context(
            state.computed, self._waiting, batch.layout, batch.size, batch.size <= MAX_WAITING_ROWS,
            step.positions, step.slots, features,
        )  # fmt: skip
        if found is None:
            return ContextBatch(features, step.positions, step.slots, token_row=batch.token_row)
        now, positions, slots, rows = found
        return ContextBatch(now, positions, slots, token_row=rows) if len(rows) else None

    def take_all(self) -> ContextBatch | None:
        """What waits of all requests, `token_row` the requests' indices; None where nothing does."""
        kept = self._waiting
        if kept is None or not (waiting := kept.counts.nonzero()[0].tolist()):
            return None
        counts = kept.counts[waiting]
        steps = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        rows, positions, slots = (
            torch.from_numpy(first.repeat(counts) + steps * moves)
            for first, moves in ((np.array(waiting), 0), (kept.positions[waiting], 1), (kept.slots[waiting], 1))
        )
        features = torch.cat([kept.features[index, :count] for index, count in zip(waiting, counts, strict=True)])
        self.clear()
        return ContextBatch(features, positions, slots, token_row=rows.int())


Tensors = tuple[torch.Tensor, ...]


class StateSnapshot:
    """What a step changes of the requests' state after `verify`, as it was before: for a step that fails midway.

    KV needs no such care: a step that failed wrote no final positions, and the next one writes those again.
    """

    def __init__(self, state: StateTensors, step: ForwardBatch) -> None:
        self._state = state
        # The token after the accepted drafts, at most k of them, then the next k drafts.
        first = (step.starts + step.batch.num_new).long()
        columns = torch.arange(2 * state.k + 1, device=first.device)
        self._positions = (first[:, None] + columns).clamp(max=state.max_len - 1)
        # Padding rows are taken for request 0; restoring them rewrites the values already there.
        self._index = step.batch.req_idx.clamp(min=0).long()
        self._tokens = state.tokens[self._index[:, None], self._positions]
        self._computed = state.computed[self._index]

    def restore(self) -> None:
        """Put everything back."""
        self._state.tokens[self._index[:, None], self._positions] = self._tokens
        self._state.computed[self._index] = self._computed


class CommonStepOps:
    """What a CPU and a GPU have in common, with the operations of a CPU: C++, where it is built, else the references.

    No two rows of a step have the same request.
    """

    _lay_out: Callable[..., Tensors] = staticmethod(verify_budget.lay_out_reference)
    _prepare: Callable[..., Tensors] = staticmethod(prepare_step.prepare_reference)
    argmax: Callable[[torch.Tensor], torch.Tensor] = staticmethod(
        cpu_ops.argmax if cpu_ops.HAS_CPU_OPS else argmax.argmax_reference
    )
    log_odds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = staticmethod(
        cpu_ops.log_odds if cpu_ops.HAS_CPU_OPS else log_odds.log_odds_reference
    )
    noisy_scores: Callable[..., torch.Tensor] = staticmethod(sample.noisy_scores_reference)
    sample: Callable[..., torch.Tensor] = staticmethod(
        cpu_ops.sample if cpu_ops.HAS_CPU_OPS else sample.sample_reference
    )
    _lowest_kept: Callable[..., torch.Tensor | None] = staticmethod(
        cpu_ops.lowest_kept if cpu_ops.HAS_CPU_OPS else logits_filter.lowest_kept_reference
    )
    _accept: Callable[..., torch.Tensor] = staticmethod(accept.accept_reference)
    apply_token_bitmask: Callable[..., None] = staticmethod(token_bitmask.apply_token_bitmask_reference)
    _penalise: Callable[..., None] = staticmethod(
        cpu_ops.count_and_penalise if cpu_ops.HAS_CPU_OPS else penalties.count_and_penalise_reference
    )
    ranked_logprobs: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = staticmethod(
        cpu_ops.ranked_logprobs if cpu_ops.HAS_CPU_OPS else logprobs.ranked_logprobs_reference
    )
    _inject_slots = staticmethod(prepare_draft.inject_slots_reference)
    _prepare_draft: Callable[..., Tensors] = staticmethod(
        cpu_step.prepare_draft if cpu_ops.HAS_CPU_OPS else prepare_draft.prepare_draft_reference
    )
    _store_drafts: Callable[..., None] = staticmethod(
        cpu_step.store_drafts if cpu_ops.HAS_CPU_OPS else prepare_draft.store_drafts_reference
    )

    _choose_drafts: Callable[..., torch.Tensor] = staticmethod(draft_choice.choose_drafts_reference)

    def choose_drafts(
        self, step: ForwardBatch, state: StateTensors, found: torch.Tensor, num_found: torch.Tensor
    ) -> torch.Tensor:
        """How many of the drafts that were looked up each row verifies next, int32 `[R]`; 0: those of the model, which
        are in the state. found: int64 `[R, k]`, of which a row has num_found, int32 `[R]`."""
        batch = step.batch
        return self._choose_drafts(
            state.tokens, state.computed, state.other_drafts, state.num_other, state.lookup_gain,
            batch.req_idx, batch.num_draft, batch.num_next_draft, step.results, found, num_found,
        )  # fmt: skip

    def apply_budget(self, step: ForwardBatch, budget: torch.Tensor, state: StateTensors) -> None:
        """Leave the step the drafts that its budget is for, and put their tokens behind one another."""
        batch = step.batch
        num_draft, query_start, query_lens, logits_start, token_row, logits_token, logits_row = self._lay_out(
            state.confidence, budget, batch.req_idx, batch.num_new, batch.num_draft, batch.logits_start,
            step.num_tokens, len(step.logits_row),
        )  # fmt: skip
        step.batch = replace(
            batch,
            num_draft=num_draft,
            query_start=query_start,
            query_lens=query_lens,
            logits_start=logits_start,
            token_row=token_row,
        )
        step.logits_token = None if step.logits_token is None else logits_token
        step.logits_row, step.budget = logits_row, None

    def prepare(self, step: ForwardBatch, state: StateTensors) -> None:
        """Fill in what the target runs."""
        batch = step.batch
        step.token_ids, step.positions, step.slots, step.starts, step.seq_lens = self._prepare(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            batch.req_idx, batch.start_bound, batch.num_unverified_drafts, batch.query_start, batch.query_lens,
            batch.token_row,
        )  # fmt: skip
        step.attention, step.padded = self._attention(step, state)
        if state.window_blocks is not None:
            step.windows = window_slots(step, state.window_blocks, state.block_size)

    @staticmethod
    def adapter_ids(step: ForwardBatch, state: StateTensors) -> torch.Tensor:
        """The number of each token's LoRA adapter, int64 `[T]`; of padding any."""
        of_rows = state.adapters.index_select(0, step.batch.req_idx.clamp(min=0))
        return of_rows.index_select(0, step.batch.token_row.clamp(min=0))

    def target_tokens(self, step: ForwardBatch, state: StateTensors) -> torch.Tensor:
        """The target's own token for each row of the step's logits, int64 `[D]`: by the request's temperature, filters
        and noise for the token's position; the argmax for a greedy request. Where no row chooses tokens, or all choose
        later, zeros."""
        if step.logits is None or step.chosen_later:
            return torch.zeros(len(step.logits_row), dtype=torch.int64, device=state.tokens.device)
        if not step.traits.sampled:
            return self.argmax(step.logits)
        return self.chosen_tokens(step.logits, *self._choices(step), state, sampled=True)

    def tokens_without_logits(
        self, step: ForwardBatch, state: StateTensors, target: TargetModel, hidden: torch.Tensor
    ) -> torch.Tensor | None:
        """As `target_tokens`, by the coarse codes of the target's head, for `hidden` `[D, hidden_size]`; None where
        they leave too many tokens that may be it."""
        if not step.traits.sampled:
            return target.likeliest(hidden)
        index, positions = self._choices(step)
        temperature, seeds, *filters = (
            each.index_select(0, index)
            for each in (state.temperature, state.seeds, state.top_k, state.top_p, state.min_p)
        )
        return target.likeliest(hidden, temperature, seeds, positions, *filters)

    @staticmethod
    def _choices(step: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of logits the index of its request, and the position of the token that it decides."""
        # After position p a row of logits decides p + 1.
        positions = step.positions + 1
        if step.logits_token is not None:
            positions = positions.index_select(0, step.logits_token)
        return step.batch.req_idx.index_select(0, step.logits_row.clamp(min=0)), positions

    def chosen_tokens(
        self, logits: torch.Tensor, req_idx: torch.Tensor, positions: torch.Tensor, state: StateTensors, sampled: bool
    ) -> torch.Tensor:
        """As `target_tokens`, for `logits` `[n, vocab]` of the requests `req_idx` (`[n]`, -1 for padding), each of
        which decides the token at its place in `positions`, int64 `[n]`. sampled: whether any has a temperature."""
        if not sampled:
            return self.argmax(logits)
        # Padding is greedy, and otherwise reads request 0.
        index = req_idx.clamp(min=0)
        temperature = state.temperature.index_select(0, index) * (req_idx >= 0)
        filters = (each.index_select(0, index) for each in (state.top_k, state.top_p, state.min_p))
        lowest_kept = self._lowest_kept(logits, temperature, *filters)
        return self.sample(logits, temperature, state.seeds.index_select(0, index), positions, lowest_kept)

    def accept(self, step: ForwardBatch, state: StateTensors) -> None:
        """Which drafts are accepted and which token follows, for the rows that sample, by `step.target_tokens`.
        Advances `state.tokens` by that token and `state.computed` of every row to its real start + num_new + accepted
        drafts."""
        batch = step.batch
        step.results = self._accept(
            step.target_tokens, state.tokens, state.computed, state.k,
            batch.req_idx, step.starts, batch.num_new, batch.num_draft, batch.logits_start,
        )  # fmt: skip

    def draft_sampler(
        self, step: ForwardBatch, state: StateTensors, temperature_ratio: float, wants_confidence: bool = False
    ) -> DraftSampler:
        """How the drafts of `prepare_draft` are chosen: at `temperature_ratio` times the request's temperature, with
        its noise."""
        if temperature_ratio == 0.0 or not step.traits.sampled:
            return DraftSampler(self, wants_confidence=wants_confidence)
        req_idx = self._draft_req_idx(step.batch, step.draft_width)
        temperature = state.temperature[req_idx] * temperature_ratio
        return DraftSampler(self, temperature, state.seeds[req_idx], wants_confidence)

    def penalise(self, logits: torch.Tensor, rows: penalties.PenalisedRows, state: StateTensors) -> None:
        """Count the tokens of `rows` that are new, and apply their penalties to `logits`, float32, in place."""
        self._penalise(logits, state.token_counts, state.num_counted, state.tokens, state.penalties, rows)

    def _attention(self, step: ForwardBatch, state: StateTensors) -> tuple[AttentionBatch, bool]:
        """The rows as attention runs them, and whether slots may be -1."""
        raise NotImplementedError

    def _draft_req_idx(self, batch: DeviceBatch, width: int) -> torch.Tensor:
        """The index of each draft's request, int64 `[num_drafts]`; 0 for padding."""
        raise NotImplementedError


class CpuStepOps(CommonStepOps):
    """The operations of a CPU, on exact lengths: only what is needed is run."""

    on_host = True

    def step_of(self, batch: HostBatch, state: StateTensors, layouts: LayoutBuffer | None = None) -> ForwardBatch:
        """As `PaddedStepOps.step_of`; in C++ it is prepared at once."""
        if not cpu_ops.HAS_CPU_OPS:
            return batch.ragged(share, state.k)
        found, query_lens, seq_lens, padded = cpu_step.lay_out(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size, batch.rows
        )
        laid_out = CpuBatch(found.layout, len(query_lens), len(found.slots))
        every = len(found.logits_token) == len(found.slots) and batch.traits.chooses
        logits_token, logits_row, starts, ends, tables, ids, positions, slots = map(torch.from_numpy, found[1:])
        step = ForwardBatch(laid_out, None if every else logits_token, logits_row, None, batch.traits, state.k)
        step.token_ids, step.positions, step.slots, step.starts, step.seq_lens = ids, positions, slots, starts, ends
        step.attention = AttentionBatch(query_lens, seq_lens, tables)
        step.padded, step.prepared = padded, True
        if state.window_blocks is not None:
            step.windows = window_slots(step, state.window_blocks, state.block_size)
        return step

    def _attention(self, step: ForwardBatch, state: StateTensors) -> tuple[AttentionBatch, bool]:
        batch = step.batch
        layout = exact_layout(batch.req_idx.numpy(), batch.query_lens.numpy(), step.seq_lens.numpy(), state)
        return layout, bool((step.slots.numpy() < 0).any())

    def accept(self, step: ForwardBatch, state: StateTensors) -> None:
        batch = step.batch
        if not isinstance(batch, CpuBatch):
            super().accept(step, state)
            return
        step.results = cpu_step.accept(
            step.target_tokens, state.tokens, state.computed, state.k, batch.layout, batch.size
        )

    def pending_context(self, state: StateTensors) -> PendingContext | None:
        return PendingContext(len(state.tokens), state.block_size) if cpu_ops.HAS_CPU_OPS else None

    def context(
        self, step: ForwardBatch, state: StateTensors, features: torch.Tensor, pending: PendingContext | None = None
    ) -> ContextBatch | None:
        """As `PaddedStepOps.context`, without padding, and without what waits in `pending`."""
        batch = step.batch
        if pending is not None and isinstance(batch, CpuBatch):
            return pending.take(step, batch, features, state)
        slots = self._inject_slots(step.slots, step.positions, batch.req_idx, state.computed, batch.token_row)
        final = torch.from_numpy((slots.numpy() >= 0).nonzero()[0])
        if not len(final):
            return None
        return ContextBatch(features[final], step.positions[final], slots[final], token_row=batch.token_row[final])

    def features_before_anchors(self, step: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """As `PaddedStepOps.features_before_anchors`, of the rows that draft."""
        last = step.batch.query_start + step.batch.num_new + step.num_accepted - 1
        return features[last[torch.from_numpy(step.batch.num_next_draft.numpy().nonzero()[0])]]

    def prepare_draft(
        self, step: ForwardBatch, state: StateTensors, placeholder_id: int, lookahead_base: int = 1
    ) -> DraftQueries:
        """As `PaddedStepOps.prepare_draft`, with only the rows that draft, and the queries that they need."""
        batch, width = step.batch, int(step.batch.num_next_draft.numpy().max()) + lookahead_base
        ids, positions, slots, lens, seq_lens = self._prepare_draft(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            batch.req_idx, batch.num_next_draft, width, placeholder_id, lookahead_base,
        )  # fmt: skip
        req_idx, query_lens, ends, draft_index = batch.req_idx.numpy(), lens.numpy(), seq_lens.numpy(), None
        if (query_lens < width).any():
            flat = (np.arange(width) < query_lens[:, None]).reshape(-1).nonzero()[0]
            draft_index = torch.from_numpy((flat % width >= lookahead_base).nonzero()[0])
            ids, positions, slots = (
                torch.from_numpy(each.numpy().reshape(-1)[flat]) for each in (ids, positions, slots)
            )
            rows = query_lens.nonzero()[0]
            req_idx, query_lens, ends = req_idx[rows], query_lens[rows], ends[rows]
        layout = exact_layout(req_idx, query_lens, ends, state)
        padded = bool((slots.numpy() < 0).any())
        return DraftQueries(
            ids.flatten(), positions.flatten(), slots.flatten(), layout, width, draft_index, padded, lookahead_base == 0
        )

    def drafts(self, batch: DeviceBatch, state: StateTensors) -> torch.Tensor:
        """As `PaddedStepOps.drafts`; by numpy, in half the time."""
        index = batch.req_idx.numpy()
        positions = state.computed.numpy()[index][:, None] + np.arange(1, state.k + 1)
        return torch.from_numpy(state.tokens.numpy()[index[:, None], np.minimum(positions, state.max_len - 1)])

    def store_drafts(
        self, drafts: Drafts, batch: DeviceBatch, state: StateTensors, num_drafts: torch.Tensor | None = None
    ) -> None:
        """As `PaddedStepOps.store_drafts`."""
        counts = batch.num_next_draft if num_drafts is None else num_drafts
        self._store_drafts(
            state.tokens, state.computed, batch.req_idx, counts, drafts.token_ids, drafts.confidence, state.confidence
        )

    def _draft_req_idx(self, batch: DeviceBatch, width: int) -> torch.Tensor:
        return torch.from_numpy(np.repeat(batch.req_idx.numpy().astype(np.int64), batch.num_next_draft.numpy()))


class PaddedStepOps(CommonStepOps):
    """What `GpuStepOps` does, by the operations of a CPU, in the host's memory: for tests, which run the steps of a
    GPU by it."""

    on_host = False

    def step_of(self, batch: HostBatch, state: StateTensors, layouts: LayoutBuffer) -> ForwardBatch:
        """A step of these rows, of any lengths."""
        return layouts.send_ragged(batch)

    def _attention(self, step: ForwardBatch, state: StateTensors) -> tuple[AttentionBatch, bool]:
        """The rows as attention runs them, and whether slots may be -1."""
        batch, bounds = step.batch, step.bounds
        assert bounds is not None
        rows = DeviceLengths(batch.query_start, batch.query_lens, step.seq_lens)
        layout = self._layout(batch, bounds.query_lens, bounds.seq_lens, rows, bounds.max_overestimate, state)
        return replace(layout, shared=step.shared, exact=bounds.exact), True

    def pending_context(self, state: StateTensors) -> PendingContext | None:
        """Where context may wait; not on a device, where injection is a small part of a step of one shape."""
        return None

    def context(
        self, step: ForwardBatch, state: StateTensors, features: torch.Tensor, pending: PendingContext | None = None
    ) -> ContextBatch | None:
        """The tokens whose positions are final, after `accept`: rejected drafts must not write context KV. features:
        `[T, L * hidden]`, of the step. pending: where context may wait, as of `pending_context`. None where there is
        nothing to write."""
        token_row = step.batch.token_row
        slots = self._inject_slots(step.slots, step.positions, step.batch.req_idx, state.computed, token_row)
        return ContextBatch(features, step.positions, slots, padded=True, token_row=token_row)

    def features_before_anchors(self, step: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Of a step's `features` `[T, width]` those of the last final token of each row, the one before its anchor:
        `[R, width]`, in the order of `prepare_draft`. What padding gets has no meaning."""
        last = step.batch.query_start + step.batch.num_new + step.num_accepted - 1
        return features.index_select(0, last.clamp(0, len(features) - 1))

    def prepare_draft(
        self, step: ForwardBatch, state: StateTensors, placeholder_id: int, lookahead_base: int = 1
    ) -> DraftQueries:
        """What the drafter's model runs, after `accept`: a row of `step.draft_width + lookahead_base` queries for
        each row of the step. lookahead_base: the drafter's, 1 or 0."""
        batch, bounds, width = step.batch, step.bounds, step.draft_width + lookahead_base
        assert bounds is not None
        ids, positions, slots, query_lens, seq_lens = self._prepare_draft(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            batch.req_idx, batch.num_next_draft, width, placeholder_id, lookahead_base,
        )  # fmt: skip
        num_rows = step.num_rows
        starts = torch.arange(0, width * num_rows, width, dtype=torch.int32, device=ids.device)
        rows = DeviceLengths(starts, query_lens, seq_lens)
        widths = np.full(num_rows, width)
        ends = np.maximum(bounds.draft_lens + (lookahead_base - 1), 0)
        layout = self._layout(batch, widths, ends, rows, bounds.max_overestimate, state)
        return DraftQueries(
            ids.flatten(), positions.flatten(), slots.flatten(), layout, width,
            padded=True, from_anchor=lookahead_base == 0,
        )  # fmt: skip

    def store_drafts(
        self, drafts: Drafts, batch: DeviceBatch, state: StateTensors, num_drafts: torch.Tensor | None = None
    ) -> None:
        """Write the first drafts of each row, as `Drafter.propose` gives them, after its anchor, and how sure the
        drafter is of them. num_drafts: how many, int32 `[R]`; by default `num_next_draft`."""
        token_ids, confidence = drafts.token_ids.view(len(batch.req_idx), -1), drafts.confidence
        if confidence is not None:
            confidence = confidence.view(token_ids.shape)
        counts = batch.num_next_draft if num_drafts is None else num_drafts
        self._store_drafts(state.tokens, state.computed, batch.req_idx, counts, token_ids, confidence, state.confidence)

    def drafts(self, batch: DeviceBatch, state: StateTensors) -> torch.Tensor:
        """The k positions behind each row's anchor, where its drafts lie: int64 `[R, k]`."""
        index = batch.req_idx.clamp(min=0).long()
        columns = torch.arange(1, state.k + 1, device=index.device)
        positions = state.computed.index_select(0, index)[:, None] + columns
        return state.tokens[index[:, None], positions.clamp(max=state.max_len - 1)]

    def _draft_req_idx(self, batch: DeviceBatch, width: int) -> torch.Tensor:
        """The index of each draft's request, int64 `[num_drafts]`; 0 for padding."""
        return batch.req_idx.clamp(min=0).long().repeat_interleave(width)

    @staticmethod
    def _layout(
        batch: DeviceBatch,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        rows: DeviceLengths,
        max_overestimate: int,
        state: StateTensors,
    ) -> AttentionBatch:
        """The rows as attention runs them, with block tables as wide as the longest row can need."""
        width = max(1, -(-int(seq_lens.max()) // state.block_size))
        tables = state.blocks[:, :width].index_select(0, batch.req_idx.clamp(min=0))
        return AttentionBatch(query_lens, seq_lens, tables, rows, max_overestimate)


class GpuStepOps(PaddedStepOps):
    """The same by Triton kernels, a launch or a few for each operation. Needs a GPU, or Triton's interpreter."""

    _lay_out = staticmethod(verify_budget.lay_out)
    _prepare = staticmethod(prepare_step.prepare)
    argmax = staticmethod(argmax.argmax)
    log_odds = staticmethod(log_odds.log_odds)
    noisy_scores = staticmethod(sample.noisy_scores)
    sample = staticmethod(sample.sample)
    _lowest_kept = staticmethod(logits_filter.lowest_kept)
    _accept = staticmethod(accept.accept)
    apply_token_bitmask = staticmethod(token_bitmask.apply_token_bitmask)
    _penalise = staticmethod(penalties.count_and_penalise)
    ranked_logprobs = staticmethod(logprobs.ranked_logprobs_reference)
    _inject_slots = staticmethod(prepare_draft.inject_slots)
    _prepare_draft = staticmethod(prepare_draft.prepare_draft)
    _store_drafts = staticmethod(prepare_draft.store_drafts)
    _choose_drafts = staticmethod(draft_choice.choose_drafts)


StepOps = CpuStepOps | PaddedStepOps


def select_step_ops(device: torch.device, wanted: str | None = None) -> StepOps:
    """The operations for `device`, as `dflash_kernels.dispatch.use_triton` chooses, which also raises."""
    return GpuStepOps() if use_triton(device, wanted) else CpuStepOps()
