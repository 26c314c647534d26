"""One step on the device: verify, accept, inject, draft, as a function of tensors alone. Run by the device runner.

Nothing here looks at a value, unless a caller's hook does, so the same code runs eagerly and is captured in graphs. It
has two parts: `verify` leaves the requests' state as it is, `finish` advances it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend, DeviceRows, RowLayout
from dflash_backend.drafters.base import DeviceDraftBlocks, DeviceDraftSampler, Drafter
from dflash_backend.models.interface import PagedContext, TargetModel
from dflash_backend.worker.device_clock import DeviceClock
from dflash_backend.worker.device_layout import StepInputs
from dflash_backend.worker.device_state import Accepted, DeviceState, Prepared, StepRows
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.step_ops import StepOps

# The times that a step notes: as it begins, and as each of its four phases ends.
NUM_MARKS = 5


@dataclass(frozen=True)
class Hooks:
    """What some steps do beside, at the price of a wait for the device.

    check: is told of K/V writes before they happen: phase, row of each slot (int32 `[n]`, -1 for padding), slots
    (int64 `[n]`, -1 for no write), and how many slots each row should write (int32 `[R]`), where that is certain.
    adjust: gives the logits that are chosen from, for those that the model gave (both `[D, vocab]`).
    accepted: is told what the accept phase decided, before anything is drafted. So a step that lacks memory for it can
    be undone: the distributions that its drafts were drawn from are still there.
    """

    check: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor | None], None] | None = None
    adjust: Callable[[torch.Tensor], torch.Tensor] | None = None
    accepted: Callable[[Accepted], None] | None = None


NO_HOOKS = Hooks()


@dataclass(frozen=True)
class Verified:
    """What `verify` found. features: `[T, L * hidden]`. best: int64 `[D]`. probs: float32 `[D, vocab]`, where a row is
    sampled. marks: int64 `[NUM_MARKS]`, times in ns."""

    prepared: Prepared
    features: torch.Tensor | None
    best: torch.Tensor
    probs: torch.Tensor | None
    marks: torch.Tensor


class DeviceStep:
    """The models, the K/V and the operations that steps are made of."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        kv: PagedKVCache,
        backend: AttentionBackend,
        ops: StepOps,
        state: DeviceState,
        greedy_drafts: bool,
        dtype: torch.dtype,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.kv = kv
        self.backend = backend
        self.ops = ops
        self.state = state
        self.greedy_drafts = greedy_drafts
        self.dtype = dtype
        self.clock = DeviceClock(state.tokens.device)

    @property
    def width(self) -> int:
        """Places of a decode row: the last known token and k drafts."""
        return self.state.k + 1

    def result_size(self, num_rows: int) -> int:
        """Numbers in the result of a step with that many rows, padding rows included."""
        return num_rows * (self.state.k + 2) + NUM_MARKS

    def run(self, inputs: StepInputs, hooks: Hooks = NO_HOOKS) -> torch.Tensor:
        """A whole step; the result is that of `finish`. Raises `torch.OutOfMemoryError`, and has changed nothing of the
        requests' state then."""
        verified = self.verify(inputs, hooks)
        before = Undo(self.state, inputs.rows, verified.prepared)
        try:
            return self.finish(inputs, verified, hooks)
        except torch.OutOfMemoryError:
            before.apply()
            raise

    def unpacked(self, result: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A result's parts, on the host: counts `[num_rows]`, tokens `[num_rows, k + 1]` and times `[NUM_MARKS]`."""
        counts, tokens, times = np.split(result, [num_rows, num_rows * (self.state.k + 2)])
        return counts, tokens.reshape(num_rows, -1), times

    def verify(self, inputs: StepInputs, hooks: Hooks = NO_HOOKS) -> Verified:
        """One target forward over all rows, and what it makes of the tokens that are to be judged."""
        marks = self.clock.marks(NUM_MARKS)
        self.clock.note(marks, 0)
        rows, traits = inputs.rows, inputs.traits
        prepared = self.ops.prepare(rows, self.state)
        if hooks.check:
            hooks.check("verify", rows.token_row, prepared.slots, rows.query_lens)
        bounds = inputs.bounds
        exact = DeviceRows(rows.query_start, rows.query_lens, prepared.seq_lens)
        layout = self._layout(rows, bounds.query_lens, bounds.seq_lens, exact, bounds.max_overestimate)
        context = PagedContext.prepare(
            layout,
            prepared.positions,
            prepared.slots,
            self.backend,
            self.target.patterns,
            self.dtype,
            padded=True,
        )
        capture = self.drafter.capture if self.drafter is not None else ()
        output = self.target.forward(prepared.token_ids, context, self.kv.target, capture)
        self.clock.note(marks, 1)

        hidden = output.hidden if inputs.dist_token is None else output.hidden.index_select(0, inputs.dist_token)
        logits = self.target.logits(hidden)
        if hooks.adjust:
            logits = hooks.adjust(logits)
        best, probs = self.ops.best(logits), None
        if traits.sampled:
            table = rows.table[inputs.dist_row.clamp(min=0)]
            parameters = self.state.sampling_rows(table, traits.any_top_k_or_p, traits.any_min_p)
            probs = self.ops.probabilities(logits, parameters)
        return Verified(prepared, output.features, best, probs, marks)

    def finish(self, inputs: StepInputs, verified: Verified, hooks: Hooks = NO_HOOKS) -> torch.Tensor:
        """Accept, inject and draft.

        Returns int64 `[result_size]`: the number of drafts that stand of each row, its new tokens, k + 1 of them with
        0 behind the last, then the times at which each phase ended.
        """
        rows, prepared, marks = inputs.rows, verified.prepared, verified.marks
        accepted = self.ops.accept(verified.best, verified.probs, rows, prepared, self.state)
        if hooks.accepted:
            hooks.accepted(accepted)
        self.clock.note(marks, 2)
        if self.drafter is not None and verified.features is not None:
            slots = self.ops.inject_slots(rows, prepared, self.state)
            if hooks.check:
                hooks.check("inject", rows.token_row, slots, None)
            self.drafter.inject(verified.features, prepared.positions, slots, padded=True)
        self.clock.note(marks, 3)
        if self.drafter is not None and inputs.traits.drafts:
            self._draft(self.drafter, inputs, hooks)
        self.clock.note(marks, 4)
        return self._packed(accepted, marks)

    def _draft(self, drafter: Drafter, inputs: StepInputs, hooks: Hooks) -> None:
        """Propose the next step's drafts and leave them in the state, behind the anchor."""
        state, rows, bounds = self.state, inputs.rows, inputs.bounds
        queries = self.ops.prepare_draft(rows, state, drafter.mask_token_id)
        width = self.width
        num_rows = len(rows.table)
        if hooks.check:
            row_of = torch.arange(num_rows, dtype=torch.int32, device=rows.table.device).repeat_interleave(width)
            hooks.check("draft", row_of, queries.slots.flatten(), queries.query_lens)
        exact = DeviceRows(queries.query_start, queries.query_lens, queries.seq_lens)
        widths = np.full(num_rows, width)
        layout = self._layout(rows, widths, bounds.draft_lens, exact, bounds.max_overestimate)
        blocks = DeviceDraftBlocks(queries.token_ids, queries.positions, queries.slots, layout)

        sampler = DeviceDraftSampler(self.ops)
        if inputs.traits.sampled and not self.greedy_drafts:
            traits = inputs.traits
            table = rows.table.repeat_interleave(state.k)
            parameters = state.sampling_rows(table, traits.any_top_k_or_p, traits.any_min_p)
            sampler = DeviceDraftSampler(self.ops, parameters, rows.sampled > 0)
        drafts = drafter.propose_on_device(blocks, sampler)
        self.ops.store_drafts(drafts, rows, state, sampler.probs)

    def _layout(
        self, rows: StepRows, query_lens: np.ndarray, seq_lens: np.ndarray, exact: DeviceRows, max_overestimate: int
    ) -> RowLayout:
        """The rows as attention runs them, with block tables as wide as the longest row can need."""
        width = max(1, -(-int(seq_lens.max()) // self.state.block_size))
        tables = self.state.blocks[:, :width].index_select(0, rows.table.clamp(min=0))
        return RowLayout(query_lens, seq_lens, tables, exact, max_overestimate)

    def _packed(self, accepted: Accepted, marks: torch.Tensor) -> torch.Tensor:
        return torch.cat([accepted.count.long(), accepted.tokens.flatten(), marks])


class Undo:
    """What `DeviceStep.finish` changes of the requests' state, as it was before: for a step that fails midway.

    K/V needs no such care: a step that failed wrote no final positions, and the next one writes those again. Nor do the
    drafts' distributions, which are stored last.
    """

    def __init__(self, state: DeviceState, rows: StepRows, prepared: Prepared) -> None:
        self._state = state
        # The token after the accepted drafts, at most k of them, then the next k drafts.
        first = (prepared.starts + rows.num_new).long()
        columns = torch.arange(2 * state.k + 1, device=first.device)
        self._positions = (first[:, None] + columns).clamp(max=state.max_len - 1)
        # Padding rows keep what somebody's row holds: put back, that is the same value once more.
        self._index = rows.table.clamp(min=0).long()
        self._tokens = state.tokens[self._index[:, None], self._positions]
        self._computed = state.computed[self._index]

    def apply(self) -> None:
        """Put everything back."""
        self._state.tokens[self._index[:, None], self._positions] = self._tokens
        self._state.computed[self._index] = self._computed
