"""The operations of a step on the requests' state: prepare, sample, accept, draft. `dflash_kernels` says beside each
kernel what it computes.

`DeviceStepOps` launches kernels. None of them waits for the device or has a shape that depends on a value, so they can
be captured in a graph; rows are padded, and the host knows bounds of their lengths. `HostStepOps` is the form of a CPU:
the kernels' references, on exact lengths, so that nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_backend.attention import AttentionBatch, DeviceLengths
from dflash_backend.core.plan import DraftBudget, ScheduledRequest
from dflash_backend.drafters.base import DraftQueries, Drafts, DraftSampler, TokenHistory
from dflash_backend.models.interface import WindowSlots
from dflash_backend.worker.batch import (
    DeviceBatch,
    DraftingRow,
    StepInputs,
    draft_of_row,
    draft_width,
    exact_layout,
    window_slots,
)
from dflash_backend.worker.state import RequestStates, StateTensors
from dflash_kernels import (
    accept,
    argmax,
    log_odds,
    logits_filter,
    noisy_scores,
    one_row,
    penalties,
    prepare_draft,
    prepare_step,
    sample,
    token_bitmask,
    verify_budget,
)
from dflash_kernels.dispatch import use_triton

Tensors = tuple[torch.Tensor, ...]


class DeviceStepOps:
    """Triton kernels, a launch or a few for each operation. Needs a GPU, or Triton's interpreter.

    No two rows of a step have the same request.
    """

    on_host = False

    _lay_out: Callable[..., Tensors] = staticmethod(verify_budget.lay_out)
    _prepare: Callable[..., Tensors] = staticmethod(prepare_step.prepare)
    _argmax: Callable[..., torch.Tensor] = staticmethod(argmax.argmax)
    _sample: Callable[..., torch.Tensor] = staticmethod(sample.sample)
    _noisy_scores: Callable[..., torch.Tensor] = staticmethod(noisy_scores.noisy_scores)
    _log_odds: Callable[..., torch.Tensor] = staticmethod(log_odds.log_odds)
    _lowest_kept: Callable[..., torch.Tensor | None] = staticmethod(logits_filter.lowest_kept)
    _accept: Callable[..., tuple[torch.Tensor, torch.Tensor]] = staticmethod(accept.accept)
    _apply_bitmask: Callable[..., None] = staticmethod(token_bitmask.apply_token_bitmask)
    _penalise: Callable[..., None] = staticmethod(penalties.count_and_penalise)
    _inject_slots = staticmethod(prepare_draft.inject_slots)
    _prepare_draft: Callable[..., Tensors] = staticmethod(prepare_draft.prepare_draft)
    _store_drafts = staticmethod(prepare_draft.store_drafts)

    def lay_out(self, inputs: StepInputs, state: StateTensors) -> StepInputs:
        """The step with the drafts that its budget is for, and with their tokens behind one another."""
        if inputs.budget is None:
            return inputs
        batch = inputs.batch
        num_draft, query_start, query_lens, logits_start, token_row, logits_token, logits_row = self._lay_out(
            state.confidence, inputs.budget, batch.req_idx, batch.num_new, batch.num_draft, batch.logits_start,
            inputs.num_tokens, len(inputs.logits_row),
        )  # fmt: skip
        laid_out = replace(
            batch,
            num_draft=num_draft,
            query_start=query_start,
            query_lens=query_lens,
            logits_start=logits_start,
            token_row=token_row,
        )
        token = None if inputs.logits_token is None else logits_token
        return replace(inputs, batch=laid_out, logits_token=token, logits_row=logits_row, budget=None)

    def prepare(self, inputs: StepInputs, state: StateTensors) -> Prepared:
        """What the target runs."""
        batch, bounds = inputs.batch, inputs.bounds
        ids, positions, slots, starts, seq_lens = self._prepared(batch, state)
        rows = DeviceLengths(batch.query_start, batch.query_lens, seq_lens)
        layout = self._layout(batch, bounds.query_lens, bounds.seq_lens, rows, bounds.max_overestimate, state)
        windows = window_slots(batch, positions, slots, layout, state)
        layout = replace(layout, shared=inputs.shared)
        return Prepared(ids, positions, slots, starts, seq_lens, layout, padded=True, windows=windows)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the `logits` `[n, vocab]` in their own dtype: int64 `[n]`, the lowest id
        among equals."""
        return self._argmax(logits)

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The column chosen in each row of `logits`, as `drafters.base.SampleOps.sample`."""
        return self._sample(logits, temperature, seeds, positions.contiguous(), token_ids=token_ids)

    def noisy_scores(
        self, logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The scores of all tokens, as `drafters.base.SampleOps.noisy_scores`."""
        return self._noisy_scores(logits, temperature, seeds, positions.contiguous())

    def log_odds(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """How sure the `logits` are of a column in each row, as `drafters.base.SampleOps.log_odds`."""
        return self._log_odds(logits, columns)

    def target_tokens(
        self, logits: torch.Tensor, inputs: StepInputs, prepared: Prepared, state: StateTensors
    ) -> torch.Tensor:
        """The target's own token for each row of the step's `logits` (`[D, vocab]`), int64 `[D]`: by the request's
        temperature, filters and noise for the token's position; the argmax for a greedy request."""
        if not inputs.traits.sampled:
            return self.argmax(logits)
        # After position p a row of logits decides p + 1.
        positions = prepared.positions + 1
        if inputs.logits_token is not None:
            positions = positions.index_select(0, inputs.logits_token)
        req_idx = inputs.batch.req_idx.index_select(0, inputs.logits_row.clamp(min=0))
        return self.chosen_tokens(logits, req_idx, positions, state, sampled=True)

    def chosen_tokens(
        self, logits: torch.Tensor, req_idx: torch.Tensor, positions: torch.Tensor, state: StateTensors, sampled: bool
    ) -> torch.Tensor:
        """As `target_tokens`, for `logits` `[n, vocab]` of the requests `req_idx` (`[n]`, -1 for padding), each of
        which decides the token at its place in `positions`, int64 `[n]`. sampled: whether any has a temperature."""
        if not sampled:
            return self.argmax(logits)
        sampling = state.sampling_tensors(req_idx)
        temperature = sampling.temperature
        lowest_kept = self._lowest_kept(logits, temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return self._sample(logits, temperature, sampling.seeds, positions, lowest_kept)

    def accept(
        self, target_tokens: torch.Tensor, batch: DeviceBatch, prepared: Prepared, state: StateTensors
    ) -> Accepted:
        """Which drafts are accepted and which token follows, for the rows that sample; advances `state.tokens` by that
        token and `state.computed` of every row to its real start + num_new + count.

        target_tokens: int64 `[D]`, the target's own token for each row of logits.
        """
        return Accepted(
            *self._accept(
                target_tokens, state.tokens, state.computed, state.k,
                batch.req_idx, prepared.starts, batch.num_new, batch.num_draft, batch.logits_start,
            )
        )  # fmt: skip

    def final_tokens(self, batch: DeviceBatch, prepared: Prepared, state: StateTensors) -> FinalTokens:
        """The tokens whose positions are final, after `accept`; rejected drafts must not write context KV."""
        slots = self._inject_slots(prepared.slots, prepared.positions, batch.req_idx, state.computed, batch.token_row)
        return FinalTokens(prepared.positions, slots, padded=True)

    def history(self, inputs: StepInputs, state: StateTensors) -> TokenHistory:
        """The tokens of the step's rows, as they are after `accept`."""
        batch = inputs.batch
        return TokenHistory(state.tokens, state.computed, batch.req_idx, batch.num_next, draft_width(inputs, state))

    def features_before_anchors(
        self, features: torch.Tensor, batch: DeviceBatch, num_accepted: torch.Tensor
    ) -> torch.Tensor:
        """Of a step's `features` `[T, width]` those of the last final token of each row, the one before its anchor:
        `[R, width]`, in the order of `prepare_draft`. num_accepted: int32 `[R]`. What padding gets has no meaning."""
        last = batch.query_start + batch.num_new + num_accepted - 1
        return features.index_select(0, last.clamp(0, len(features) - 1))

    def prepare_draft(
        self, inputs: StepInputs, state: StateTensors, placeholder_id: int, lookahead_base: int = 1
    ) -> DraftQueries:
        """What the drafter's model runs, after `accept`: a row of `inputs.draft_width + lookahead_base` queries for
        each row of the step. lookahead_base: the drafter's, 1 or 0."""
        batch, bounds, width = inputs.batch, inputs.bounds, draft_width(inputs, state) + lookahead_base
        ids, positions, slots, query_lens, seq_lens = self._prepared_draft(
            batch, state, placeholder_id, width, lookahead_base
        )
        num_rows = inputs.num_rows
        starts = torch.arange(0, width * num_rows, width, dtype=torch.int32, device=ids.device)
        rows = DeviceLengths(starts, query_lens, seq_lens)
        widths = np.full(num_rows, width)
        ends = np.maximum(bounds.draft_lens + (lookahead_base - 1), 0)
        layout = self._layout(batch, widths, ends, rows, bounds.max_overestimate, state)
        return DraftQueries(
            ids.flatten(), positions.flatten(), slots.flatten(), layout, width,
            padded=True, from_anchor=lookahead_base == 0,
        )  # fmt: skip

    def draft_sampler(
        self, inputs: StepInputs, state: StateTensors, temperature_ratio: float, wants_confidence: bool = False
    ) -> DraftSampler:
        """How the drafts of `prepare_draft` are chosen: at `temperature_ratio` times the request's temperature, with
        its noise."""
        if temperature_ratio == 0.0 or not inputs.traits.sampled:
            return DraftSampler(self, wants_confidence=wants_confidence)
        req_idx = self._draft_req_idx(inputs.batch, draft_width(inputs, state))
        temperature = state.temperature[req_idx] * temperature_ratio
        return DraftSampler(self, temperature, state.seeds[req_idx], wants_confidence)

    def store_drafts(self, drafts: Drafts, batch: DeviceBatch, state: StateTensors) -> None:
        """Write `num_next` of each row's drafts, as `Drafter.propose` gives them, behind its anchor, and how sure the
        drafter is of them."""
        token_ids, confidence = drafts.token_ids.view(len(batch.req_idx), -1), drafts.confidence
        if confidence is not None:
            confidence = confidence.view(token_ids.shape)
        self._store_drafts(
            state.tokens, state.computed, batch.req_idx, batch.num_next, token_ids, confidence, state.confidence
        )

    def drafts(self, batch: DeviceBatch, state: StateTensors) -> torch.Tensor:
        """The k positions behind each row's anchor, where its drafts lie: int64 `[R, k]`."""
        index = batch.req_idx.clamp(min=0).long()
        columns = torch.arange(1, state.k + 1, device=index.device)
        positions = state.computed.index_select(0, index)[:, None] + columns
        return state.tokens[index[:, None], positions.clamp(max=state.max_len - 1)]

    def apply_token_bitmask(self, logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
        """Set `logits` to -inf where the packed masks of their `rows` have a 0, in place."""
        self._apply_bitmask(logits, bitmask, rows)

    def penalise(self, logits: torch.Tensor, rows: penalties.PenalisedRows, state: StateTensors) -> None:
        """Count the tokens of `rows` that are new, and apply their penalties to `logits`, float32, in place."""
        self._penalise(logits, state.token_counts, state.num_counted, state.tokens, state.penalties, rows)

    def _draft_req_idx(self, batch: DeviceBatch, width: int) -> torch.Tensor:
        """The index of each draft's request, int64 `[num_drafts]`; 0 for padding."""
        return batch.req_idx.clamp(min=0).long().repeat_interleave(width)

    def _prepared(self, batch: DeviceBatch, state: StateTensors) -> Tensors:
        return self._prepare(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            batch.req_idx, batch.start, batch.num_unverified, batch.query_start, batch.query_lens, batch.token_row,
        )  # fmt: skip

    def _prepared_draft(
        self, batch: DeviceBatch, state: StateTensors, placeholder_id: int, width: int, lookahead_base: int
    ) -> Tensors:
        return self._prepare_draft(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            batch.req_idx, batch.num_next, width, placeholder_id, lookahead_base,
        )  # fmt: skip

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


class HostStepOps(DeviceStepOps):
    """The references, on exact lengths: as `DeviceStepOps`, but only what is needed is run."""

    on_host = True

    _lay_out = staticmethod(verify_budget.lay_out_reference)
    _prepare = staticmethod(prepare_step.prepare_reference)
    _argmax = staticmethod(argmax.argmax_reference)
    _sample = staticmethod(sample.sample_reference)
    _noisy_scores = staticmethod(noisy_scores.noisy_scores_reference)
    _log_odds = staticmethod(log_odds.log_odds_reference)
    _lowest_kept = staticmethod(logits_filter.lowest_kept_reference)
    _accept = staticmethod(accept.accept_reference)
    _apply_bitmask = staticmethod(token_bitmask.apply_token_bitmask_reference)
    _penalise = staticmethod(penalties.count_and_penalise_reference)
    _inject_slots = staticmethod(prepare_draft.inject_slots_reference)
    _prepare_draft = staticmethod(prepare_draft.prepare_draft_reference)
    _store_drafts = staticmethod(prepare_draft.store_drafts_reference)

    def prepare(self, inputs: StepInputs, state: StateTensors) -> Prepared:
        """As `DeviceStepOps.prepare`."""
        batch = inputs.batch
        ids, positions, slots, starts, seq_lens = self._prepared(batch, state)
        layout = exact_layout(batch.req_idx.numpy(), batch.query_lens.numpy(), seq_lens.numpy(), state)
        windows = window_slots(batch, positions, slots, layout, state)
        return Prepared(ids, positions, slots, starts, seq_lens, layout, bool((slots.numpy() < 0).any()), windows)

    def final_tokens(self, batch: DeviceBatch, prepared: Prepared, state: StateTensors) -> FinalTokens:
        """As `DeviceStepOps.final_tokens`."""
        if len(batch.req_idx) == 1 and not prepared.padded:
            end = state.computed.numpy().item(one_row.number(batch.req_idx))
            final_part = slice(end - one_row.number(prepared.starts))
            return FinalTokens(prepared.positions[final_part], prepared.slots[final_part], final_part)
        slots = super().final_tokens(batch, prepared, state).slots
        final = slots.numpy() >= 0
        if final.all():
            return FinalTokens(prepared.positions, prepared.slots)
        index = torch.from_numpy(final.nonzero()[0])
        return FinalTokens(prepared.positions[index], slots[index], index)

    def features_before_anchors(
        self, features: torch.Tensor, batch: DeviceBatch, num_accepted: torch.Tensor
    ) -> torch.Tensor:
        """As `DeviceStepOps.features_before_anchors`, of the rows that draft."""
        last = batch.query_start + batch.num_new + num_accepted - 1
        return features[last[torch.from_numpy(batch.num_next.numpy().nonzero()[0])]]

    def prepare_draft(
        self, inputs: StepInputs, state: StateTensors, placeholder_id: int, lookahead_base: int = 1
    ) -> DraftQueries:
        """As `DeviceStepOps.prepare_draft`, with only the rows that draft, and the queries that they need."""
        batch, most = inputs.batch, state.k + lookahead_base
        if inputs.num_rows == 1 and (of_row := draft_of_row(batch, state, placeholder_id, lookahead_base)) is not None:
            return of_row
        ids, positions, slots, lens, seq_lens = self._prepared_draft(batch, state, placeholder_id, most, lookahead_base)
        query_lens = lens.numpy()
        rows = query_lens.nonzero()[0]
        query_lens = query_lens[rows]
        layout = exact_layout(batch.req_idx.numpy()[rows], query_lens, seq_lens.numpy()[rows], state)
        width = int(query_lens.max())
        draft_index = None
        if len(rows) < inputs.num_rows or width < most or (query_lens < width).any():
            flat = (np.arange(most) < lens.numpy()[:, None]).reshape(-1).nonzero()[0]
            draft_index = torch.from_numpy((flat % most >= lookahead_base).nonzero()[0])
            ids, positions, slots = (
                torch.from_numpy(each.numpy().reshape(-1)[flat]) for each in (ids, positions, slots)
            )
        padded = bool((slots.numpy() < 0).any())
        return DraftQueries(
            ids.flatten(), positions.flatten(), slots.flatten(), layout, width, draft_index, padded, lookahead_base == 0
        )

    def drafts(self, batch: DeviceBatch, state: StateTensors) -> torch.Tensor:
        """As `DeviceStepOps.drafts`; by numpy, in half the time."""
        index = batch.req_idx.numpy()
        positions = state.computed.numpy()[index][:, None] + np.arange(1, state.k + 1)
        return torch.from_numpy(state.tokens.numpy()[index[:, None], np.minimum(positions, state.max_len - 1)])

    def store_drafts(self, drafts: Drafts, batch: DeviceBatch, state: StateTensors) -> None:
        """As `DeviceStepOps.store_drafts`."""
        self._store_drafts(
            state.tokens, state.computed, batch.req_idx, batch.num_next,
            drafts.token_ids, drafts.confidence, state.confidence,
        )  # fmt: skip

    @staticmethod
    def verified_lens(
        budget: DraftBudget, req_idx: np.ndarray, num_draft: np.ndarray, state: StateTensors
    ) -> np.ndarray:
        """How many of the drafts of each of a plan's rows are verified: int64 `[n]`. req_idx: of each row. num_draft:
        the drafts that it has."""
        return verify_budget.verified_lens_reference(
            state.confidence.numpy()[req_idx],
            num_draft,
            budget.weight,
            np.array(budget.offsets, dtype=np.float32),
            np.array(budget.effects, dtype=np.float32),
            budget.num_drafts,
        )

    def _draft_req_idx(self, batch: DeviceBatch, width: int) -> torch.Tensor:
        return torch.from_numpy(np.repeat(batch.req_idx.numpy().astype(np.int64), batch.num_next.numpy()))


StepOps = DeviceStepOps


def select_step_ops(device: torch.device, wanted: str | None = None) -> StepOps:
    """The operations for `device`, as `dflash_kernels.dispatch.use_triton` chooses, which also raises."""
    return DeviceStepOps() if use_triton(device, wanted) else HostStepOps()


@dataclass(frozen=True)
class Prepared:
    """What the target runs. token_ids, positions, slots: int64 `[T]`. starts, seq_lens: int32 `[R]`, 0 for padding.
    layout: the rows as attention runs them. padded: whether slots may be -1. windows: where the KV of layers with a
    window lies, if these have block ids of their own.

    A padding token, and one that lies past its row's blocks (the request has ended meanwhile), has slot -1, id 0 and
    position 0. `seq_lens` never goes past a row's blocks either.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    layout: AttentionBatch
    padded: bool
    windows: WindowSlots | None = None


@dataclass(frozen=True)
class Accepted:
    """What the accept phase decided. count: int32 `[R]`, accepted drafts. tokens: int64 `[R, k + 1]`, those drafts and
    the token that follows, then 0; all 0 for a row that does not sample."""

    count: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class FinalTokens:
    """The tokens whose context KV is written: positions and slots int64 `[n]`; index: int64 `[n]` or a slice, their
    places among the step's tokens, None for all of them. padded: whether slots may be -1, where nothing is kept."""

    positions: torch.Tensor
    slots: torch.Tensor
    index: torch.Tensor | slice | None = None
    padded: bool = False


def drafting_rows(rows: Sequence[ScheduledRequest], requests: RequestStates) -> list[DraftingRow]:
    """Those of a step's rows. What a row yields that does not sample has no meaning, so it has no place here."""
    found = []
    for number, row in enumerate(rows):
        if row.sample and row.num_next_draft:
            record = requests.records[row.request_id]
            found.append(DraftingRow(number, record.num_prompt_tokens, record.ending))
    return found


def ended_rows(
    req_idx: torch.Tensor, accepted: Accepted, state: StateTensors, rows: Sequence[DraftingRow]
) -> list[int]:
    """The numbers of those of `rows` whose answers end with the tokens that they yield; after `accept`, on the host.
    req_idx: int32 `[R]`, the index of each row's request."""
    if not rows:
        return []
    counts, tokens, indices = accepted.count.tolist(), accepted.tokens.tolist(), req_idx.tolist()
    computed = state.computed.numpy()
    found = []
    for number, num_prompt_tokens, rule in rows:
        num_new = counts[number] + 1
        num_before = computed.item(indices[number]) + 1 - num_new - num_prompt_tokens
        if rule.apply(tokens[number][:num_new], num_before)[1] is not None:
            found.append(number)
    return found
