"""The operations of a step on state that lies on the device: prepare, accept, draft. Called by the device runner.

None of them waits for the device, looks at a value on the host, or has a shape that depends on one, so all of them can
be captured in a graph. What an operation computes is said beside its kernel, in `dflash_kernels`, whose references are
the torch form. Shapes are those of `device_state`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dflash_backend.sampling.filtering import SamplingRows, probabilities
from dflash_backend.sampling.random import Stream
from dflash_backend.worker.device_state import Accepted, DeviceState, DraftQueries, Prepared, StepRows
from dflash_kernels import accept, argmax, cut_softmax, prepare_draft, prepare_step
from dflash_kernels import draw as race
from dflash_kernels.dispatch import use_triton


class StepOps(Protocol):
    """What the device runner needs. No two rows of a step have the same row of `DeviceState`."""

    def prepare(self, rows: StepRows, state: DeviceState) -> Prepared:
        """What the target runs."""
        ...

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each of the `logits` `[n, vocab]` in their own dtype: int64 `[n]`, the lowest id
        among equals."""
        ...

    def probabilities(self, logits: torch.Tensor, parameters: SamplingRows) -> torch.Tensor:
        """What each row samples from: `[n, vocab]` logits -> float32, as `sampling.filtering.probabilities`."""
        ...

    def draw(self, weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """One token for each row of `weights`, as `sampling.filtering.draw`."""
        ...

    def accept(
        self, best: torch.Tensor, probs: torch.Tensor | None, rows: StepRows, prepared: Prepared, state: DeviceState
    ) -> Accepted:
        """Which drafts stand and which token follows, for the rows that sample; advances `state.tokens` by that token
        and `state.computed` of every row to `start + num_new + count`.

        best: int64 `[D]`, for each distribution the target's most likely token. probs: float32 `[D, vocab]`, what
        sampled rows choose from; None when no row of the step is sampled.
        """
        ...

    def inject_slots(self, rows: StepRows, prepared: Prepared, state: DeviceState) -> torch.Tensor:
        """The tokens' slots, int64 `[T]`, with -1 for positions that are not final, after `accept`."""
        ...

    def prepare_draft(self, rows: StepRows, state: DeviceState, mask_token_id: int) -> DraftQueries:
        """What the drafter runs, after `accept`: a row of `state.k + 1` queries for each row of the step."""
        ...

    def store_drafts(
        self, drafts: torch.Tensor, rows: StepRows, state: DeviceState, probs: torch.Tensor | None = None
    ) -> None:
        """Write `num_next` of each row's `drafts` (int64 `[R, k]`, the target's ids) behind its anchor.

        probs: float32 `[R, k, vocab]` over the target's ids, what the drafts of sampled rows were drawn from, which
        are kept for `accept`; `state.keep_draft_probs` comes before. None when none was drawn.
        """
        ...


class TorchStepOps:
    """See `StepOps`: the references themselves, a few torch calls each."""

    _prepare = staticmethod(prepare_step.prepare_reference)
    _argmax = staticmethod(argmax.argmax_reference)
    _draw = staticmethod(race.draw_reference)
    _accept = staticmethod(accept.accept_reference)
    _inject_slots = staticmethod(prepare_draft.inject_slots_reference)
    _prepare_draft = staticmethod(prepare_draft.prepare_draft_reference)
    _store_drafts = staticmethod(prepare_draft.store_drafts_reference)
    _store_probs = staticmethod(prepare_draft.store_probs_reference)

    def prepare(self, rows: StepRows, state: DeviceState) -> Prepared:
        """See `StepOps.prepare`."""
        return Prepared(
            *self._prepare(
                state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
                rows.table, rows.start, rows.uncertain, rows.query_start, rows.query_lens, rows.token_row,
            )
        )  # fmt: skip

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """See `StepOps.best`."""
        return self._argmax(logits)

    def probabilities(self, logits: torch.Tensor, parameters: SamplingRows) -> torch.Tensor:
        """See `StepOps.probabilities`."""
        return probabilities(logits, parameters)

    def draw(self, weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        """See `StepOps.draw`."""
        return self._draw(weights, seeds.contiguous(), positions.contiguous(), stream)

    def accept(
        self, best: torch.Tensor, probs: torch.Tensor | None, rows: StepRows, prepared: Prepared, state: DeviceState
    ) -> Accepted:
        """See `StepOps.accept`."""
        return Accepted(
            *self._accept(
                best, probs, state.draft_probs, state.tokens, state.computed, state.seeds, state.k,
                rows.table, prepared.starts, rows.num_new, rows.num_draft, rows.dist_start, rows.sampled,
                Stream.ACCEPT, Stream.TARGET,
            )
        )  # fmt: skip

    def inject_slots(self, rows: StepRows, prepared: Prepared, state: DeviceState) -> torch.Tensor:
        """See `StepOps.inject_slots`."""
        return self._inject_slots(prepared.slots, prepared.positions, rows.table, state.computed, rows.token_row)

    def prepare_draft(self, rows: StepRows, state: DeviceState, mask_token_id: int) -> DraftQueries:
        """See `StepOps.prepare_draft`."""
        ids, positions, slots, query_lens, seq_lens = self._prepare_draft(
            state.tokens, state.blocks, state.num_blocks, state.computed, state.block_size,
            rows.table, rows.num_next, state.k, mask_token_id,
        )  # fmt: skip
        return DraftQueries(ids, positions, slots, _every(1 + state.k, rows), query_lens, seq_lens)

    def store_drafts(
        self, drafts: torch.Tensor, rows: StepRows, state: DeviceState, probs: torch.Tensor | None = None
    ) -> None:
        """See `StepOps.store_drafts`."""
        self._store_drafts(state.tokens, state.computed, rows.table, rows.num_next, drafts.contiguous())
        if probs is not None:
            self._store_probs(_kept_probs(state), rows.table, rows.num_next, rows.sampled, probs.contiguous())


if prepare_step.triton is not None:

    class TritonStepOps(TorchStepOps):
        """See `StepOps`: a kernel or a few for each operation. Needs a GPU, or Triton's interpreter."""

        _prepare = staticmethod(prepare_step.prepare)
        _argmax = staticmethod(argmax.argmax)
        _draw = staticmethod(race.draw)
        _accept = staticmethod(accept.accept)
        _inject_slots = staticmethod(prepare_draft.inject_slots)
        _prepare_draft = staticmethod(prepare_draft.prepare_draft)
        _store_drafts = staticmethod(prepare_draft.store_drafts)
        _store_probs = staticmethod(prepare_draft.store_probs)

        def probabilities(self, logits: torch.Tensor, parameters: SamplingRows) -> torch.Tensor:
            """See `StepOps.probabilities`."""
            return cut_softmax.cut_softmax(
                logits, parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p
            )


def select_step_ops(device: torch.device, wanted: str | None = None) -> StepOps:
    """The operations that `use_triton` chooses, which raises `ValueError` for those that are not there."""
    return TritonStepOps() if use_triton(device, wanted) else TorchStepOps()


def _every(size: int, rows: StepRows) -> torch.Tensor:
    """Where each row begins when every row has `size` places: int32 `[R]`."""
    return torch.arange(0, size * len(rows.table), size, dtype=torch.int32, device=rows.table.device)


def _kept_probs(state: DeviceState) -> torch.Tensor:
    """The state's distributions of drawn drafts. Raises `RuntimeError` when there is no room for them."""
    if state.draft_probs is None:
        raise RuntimeError(
            "drafts were drawn, but the device state has no room for their distributions; "
            "call DeviceState.keep_draft_probs when the first sampled request comes"
        )
    return state.draft_probs
