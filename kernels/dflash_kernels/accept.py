"""Which drafts are accepted and which token follows them; advances the requests' state.

Greedy rows compare drafts with the target's argmax. Sampled rows do rejection sampling (Leviathan et al., arXiv
2211.17192; Chen et al., arXiv 2302.01318): draft d from q is accepted with probability min(1, p(d) / q(d)); the first
rejected one is replaced by a draw from max(p - q, 0); if all are accepted, one more token is drawn from p. State,
padding and references are as in `prepare_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_kernels.argmax import WARPS
from dflash_kernels.draw import GUMBEL_TILE, draw_reference
from dflash_kernels.random_numbers import uniform

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None

if triton is not None:
    from dflash_kernels.argmax import argmax_of_tiles, tile_buffers
    from dflash_kernels.draw import gumbel_max
    from dflash_kernels.random_numbers import state_bits, uniform_of


def residual_reference(p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), float32 `[n, vocab]`, for `p` and `q` alike; q None: all on the `drafts` (int64 `[n]`).

    p and q equal up to rounding leave nothing of p - q; then p itself is the limit.
    """
    left = p.scatter(1, drafts[:, None], 0.0) if q is None else (p - q).clamp_(min=0.0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0.0, left, p)


def accept_reference(
    argmax: torch.Tensor,
    probs: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    tokens: torch.Tensor,
    computed: torch.Tensor,
    seeds: torch.Tensor,
    k: int,
    req_idx: torch.Tensor,
    starts: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    logits_start: torch.Tensor,
    sampled: torch.Tensor,
    accept_stream: int,
    target_stream: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts of each row, int32 `[R]`, and its new tokens, int64 `[R, k + 1]`, 0 behind the last of them.

    argmax: int64 `[D]`, the target's most likely tokens. probs: float32 `[D, vocab]`, what sampled rows choose from;
    None when every row is greedy. draft_probs: float32 `[S, k, vocab]`, what the drafts were drawn from; None when they
    were the drafter's most likely tokens, so that q is all on the draft. tokens: int64 `[S, max_len]`, in which the
    drafts lie, and where the token after the accepted ones is written. computed: int32 `[S]`, set to
    `starts + num_new + count`. seeds: int64 `[S]`. req_idx, starts, num_new, num_draft, logits_start, sampled: int32
    `[R]`; logits_start is the index of the row's first entry in `argmax` and `probs`.

    A row with logits_start -1 does not sample: nothing is accepted, and `computed` advances by `num_new`.
    """
    index = np.maximum(req_idx.numpy(), 0)
    first = (starts + num_new).numpy().astype(np.int64)
    lens, offsets = num_draft.numpy(), logits_start.numpy()
    rows, column = np.arange(len(index)), np.arange(k + 1)
    drafts = _read_drafts_reference(tokens, index, first[:, None] + column)
    choices = argmax.numpy() if len(argmax) else np.zeros(1, dtype=np.int64)
    logits_rows = np.minimum(np.maximum(offsets, 0)[:, None] + column, len(choices) - 1)
    choices = choices[logits_rows]
    is_draft = column < lens[:, None]
    count = _num_leading_reference((drafts == choices) & is_draft)
    following = choices[rows, count]
    drawn = ((sampled.numpy() > 0) & (offsets >= 0)).nonzero()[0] if probs is not None else rows[:0]
    if probs is not None and len(drawn):
        q = draft_probs if k > 0 else None
        part = _SampledRows(index[drawn], first[drawn], drafts[drawn], is_draft[drawn], logits_rows[drawn])
        count[drawn] = part.count(probs, q, seeds, accept_stream)
        following[drawn] = part.following(probs, q, seeds, count[drawn], target_stream)

    new_tokens = np.where(column < count[:, None], drafts, 0)
    new_tokens[rows, count] = np.where(offsets >= 0, following, 0)
    end, real = first + count, req_idx.numpy() >= 0
    written = real & (offsets >= 0) & (end < tokens.shape[1])
    tokens.numpy()[index[written], end[written]] = following[written]
    computed.numpy()[index[real]] = end[real]
    return torch.from_numpy(count.astype(np.int32)), torch.from_numpy(new_tokens)


@dataclass(frozen=True)
class _SampledRows:
    """The rows of a step that do rejection sampling: request index and position of the first draft, `[n]`; drafts,
    which of them there are, and the index in `probs` that each is verified by, `[n, k + 1]`."""

    index: np.ndarray
    first: np.ndarray
    drafts: np.ndarray
    is_draft: np.ndarray
    logits_rows: np.ndarray

    def count(
        self, probs: torch.Tensor, draft_probs: torch.Tensor | None, seeds: torch.Tensor, stream: int
    ) -> np.ndarray:
        """Accepted drafts of each row, `[n]`."""
        column = np.arange(self.drafts.shape[1])
        p = probs.numpy()[self.logits_rows, self.drafts]
        positions = torch.from_numpy(self.first[:, None] + column)
        numbers = uniform(seeds[torch.from_numpy(self.index)][:, None].expand_as(positions), positions, stream).numpy()
        if draft_probs is not None:
            columns = np.minimum(column, draft_probs.shape[1] - 1)
            numbers = numbers * draft_probs.numpy()[self.index[:, None], columns, self.drafts]
        return _num_leading_reference((numbers < p) & self.is_draft)

    def following(
        self,
        probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        seeds: torch.Tensor,
        count: np.ndarray,
        stream: int,
    ) -> np.ndarray:
        """The token behind the `count` accepted drafts of each row, `[n]`."""
        rows = np.arange(len(count))
        weights = probs[torch.from_numpy(self.logits_rows[rows, count])]
        rejected = self.is_draft[rows, count].nonzero()[0]
        if len(rejected):
            at, columns = torch.from_numpy(rejected), torch.from_numpy(count[rejected])
            q = None if draft_probs is None else draft_probs[torch.from_numpy(self.index[rejected]), columns]
            drafts = torch.from_numpy(self.drafts[rejected, count[rejected]])
            weights[at] = residual_reference(weights[at], q, drafts)
        ends = torch.from_numpy(self.first + count)
        return draw_reference(weights, seeds[torch.from_numpy(self.index)], ends, stream).numpy()


def _num_leading_reference(accepted: np.ndarray) -> np.ndarray:
    """How many are True before the first that is not, in each row: int64 `[n]`."""
    leading: np.ndarray = np.logical_and.accumulate(accepted, axis=1).sum(axis=1)
    return leading


def _read_drafts_reference(tokens: torch.Tensor, index: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What `tokens` of requests `index` (`[R]`) hold at `positions` (`[R, n]`), 0 past the width: int64 `[R, n]`."""
    within = positions < tokens.shape[1]
    return np.where(within, tokens.numpy()[index[:, None], np.where(within, positions, 0)], 0)


if triton is not None:

    @triton.jit
    def _read_drafts(tokens_ptr, req_idx, first, column, max_len):
        """The drafts at `first + column`, 0 past the width of `tokens` and for a padding row."""
        positions = first + column
        kept = positions < tl.where(req_idx >= 0, max_len, 0)
        return tl.load(tokens_ptr + req_idx.to(tl.int64) * max_len + positions, mask=kept, other=0)

    @triton.jit
    def _num_leading(accepted, column, num_draft):
        """How many drafts are accepted before the first rejected one; `accepted` and `column` are vectors."""
        rejected = (column >= num_draft) | (accepted == 0)
        return tl.min(tl.where(rejected, column, num_draft), axis=0)

    @triton.jit
    def _write_outcome(
        tokens_ptr, computed_ptr, count_ptr, out_ptr, row, req_idx, first, logits_row, count, following, k, max_len,
        COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Write a row's outcome: its new tokens, and its state."""
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, req_idx, first, column, max_len)
        following = tl.where(logits_row >= 0, following, 0)
        new_tokens = tl.where(column < count, drafts, tl.where(column == count, following, 0))
        tl.store(count_ptr + row, count)
        tl.store(out_ptr + row * (k + 1) + column, new_tokens, mask=column <= k)
        end = first + count
        if req_idx >= 0:
            tl.store(computed_ptr + req_idx, end)
            if (logits_row >= 0) & (end < max_len):
                tl.store(tokens_ptr + req_idx.to(tl.int64) * max_len + end, following)

    @triton.jit
    def _accept_greedy_kernel(
        argmax_ptr, tokens_ptr, computed_ptr, req_idx_ptr, starts_ptr, num_new_ptr, num_draft_ptr, logits_start_ptr,
        count_ptr, out_ptr, k, max_len, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program decides on one row."""
        row = tl.program_id(0)
        req_idx, logits_row = tl.load(req_idx_ptr + row), tl.load(logits_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        num_draft = tl.where(logits_row >= 0, tl.load(num_draft_ptr + row), 0)
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, req_idx, first, column, max_len)
        argmax = tl.load(argmax_ptr + logits_row + column, mask=column < num_draft, other=-1)
        count = _num_leading(drafts == argmax, column, num_draft)
        following = tl.load(argmax_ptr + logits_row + count, mask=logits_row >= 0, other=0)
        _write_outcome(
            tokens_ptr, computed_ptr, count_ptr, out_ptr, row, req_idx, first, logits_row, count, following,
            k, max_len, COLUMNS,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["accept_stream"])
    def _count_kernel(
        argmax_ptr, probs_ptr, draft_probs_ptr, tokens_ptr, seeds_ptr,
        req_idx_ptr, starts_ptr, num_new_ptr, num_draft_ptr, logits_start_ptr, sampled_ptr, count_ptr,
        accept_stream, k, max_len, vocab, DRAWN: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program counts the accepted drafts of one row."""
        row = tl.program_id(0)
        req_idx, logits_row = tl.load(req_idx_ptr + row), tl.load(logits_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        num_draft = tl.where(logits_row >= 0, tl.load(num_draft_ptr + row), 0)
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, req_idx, first, column, max_len)
        is_draft = column < num_draft
        if tl.load(sampled_ptr + row) > 0:
            p = tl.load(probs_ptr + (logits_row + column).to(tl.int64) * vocab + drafts, mask=is_draft, other=0.0)
            numbers = uniform_of(
                state_bits(tl.load(seeds_ptr + req_idx, mask=req_idx >= 0, other=0), first + column, accept_stream)
            )
            if DRAWN:
                place = (req_idx.to(tl.int64) * k + column) * vocab + drafts
                numbers *= tl.load(draft_probs_ptr + place, mask=is_draft, other=1.0).to(tl.float64)
            count = _num_leading(numbers < p.to(tl.float64), column, num_draft)
        else:
            argmax = tl.load(argmax_ptr + logits_row + column, mask=is_draft, other=-1)
            count = _num_leading(drafts == argmax, column, num_draft)
        tl.store(count_ptr + row, count)

    @triton.jit(do_not_specialize=["target_stream", "num_rows"])
    def _resample_kernel(
        probs_ptr, draft_probs_ptr, tokens_ptr, seeds_ptr,
        req_idx_ptr, starts_ptr, num_new_ptr, num_draft_ptr, logits_start_ptr, sampled_ptr, count_ptr,
        value_ptr, index_ptr, target_stream, k, max_len, vocab, num_rows, num_tiles,
        DRAWN: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program draws the token that follows, in one tile of one sampled row.

        Twice: by the residual, and by p for the case that nothing is left of it, which only all tiles together know.
        """
        row, tile = tl.program_id(0), tl.program_id(1)
        req_idx, logits_row = tl.load(req_idx_ptr + row), tl.load(logits_start_ptr + row)
        if (logits_row >= 0) & (tl.load(sampled_ptr + row) > 0):
            count = tl.load(count_ptr + row)
            end = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row) + count
            state = state_bits(tl.load(seeds_ptr + req_idx), end, target_stream)
            offsets = tile * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < vocab
            p = tl.load(probs_ptr + (logits_row + count).to(tl.int64) * vocab + offsets, mask=inside, other=0.0)
            left = p
            if count < tl.load(num_draft_ptr + row):
                if DRAWN:
                    place = (req_idx.to(tl.int64) * k + count) * vocab + offsets
                    left = tl.maximum(p - tl.load(draft_probs_ptr + place, mask=inside, other=0.0), 0.0)
                else:
                    left = tl.where(offsets == _read_drafts(tokens_ptr, req_idx, end, 0, max_len), 0.0, p)
            value, index = gumbel_max(left, state, offsets, vocab)
            place = row.to(tl.int64) * num_tiles + tile
            tl.store(value_ptr + place, value)
            tl.store(index_ptr + place, index)
            value, index = gumbel_max(p, state, offsets, vocab)
            place = (num_rows + row).to(tl.int64) * num_tiles + tile
            tl.store(value_ptr + place, value)
            tl.store(index_ptr + place, index)

    @triton.jit(do_not_specialize=["num_rows"])
    def _write_kernel(
        argmax_ptr, tokens_ptr, computed_ptr,
        req_idx_ptr, starts_ptr, num_new_ptr, logits_start_ptr, sampled_ptr, count_ptr, value_ptr, index_ptr, out_ptr,
        k, max_len, num_rows, num_tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """One program finds one row's following token and writes the outcome."""
        row = tl.program_id(0)
        req_idx, logits_row = tl.load(req_idx_ptr + row), tl.load(logits_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        count = tl.load(count_ptr + row)
        following = tl.load(argmax_ptr + logits_row + count, mask=logits_row >= 0, other=0)
        if (logits_row >= 0) & (tl.load(sampled_ptr + row) > 0):
            value, following = argmax_of_tiles(value_ptr, index_ptr, row, num_tiles, TILES)
            if value < 0.0:
                _, following = argmax_of_tiles(value_ptr, index_ptr, num_rows + row, num_tiles, TILES)
        _write_outcome(
            tokens_ptr, computed_ptr, count_ptr, out_ptr, row, req_idx, first, logits_row, count, following,
            k, max_len, COLUMNS,
        )  # fmt: skip

    def accept(
        argmax: torch.Tensor,
        probs: torch.Tensor | None,
        draft_probs: torch.Tensor | None,
        tokens: torch.Tensor,
        computed: torch.Tensor,
        seeds: torch.Tensor,
        k: int,
        req_idx: torch.Tensor,
        starts: torch.Tensor,
        num_new: torch.Tensor,
        num_draft: torch.Tensor,
        logits_start: torch.Tensor,
        sampled: torch.Tensor,
        accept_stream: int,
        target_stream: int,
        tile: int = GUMBEL_TILE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `accept_reference`, up to the rounding of a logarithm, for contiguous tensors."""
        num_rows, device, max_len = len(req_idx), tokens.device, tokens.shape[1]
        count = torch.empty(num_rows, dtype=torch.int32, device=device)
        out = torch.empty(num_rows, k + 1, dtype=torch.int64, device=device)
        if num_rows == 0:
            return count, out
        columns = triton.next_power_of_2(k + 1)
        if probs is None or len(probs) == 0:
            _accept_greedy_kernel[(num_rows,)](
                argmax, tokens, computed, req_idx, starts, num_new, num_draft, logits_start, count, out,
                k, max_len, COLUMNS=columns,
            )  # fmt: skip
            return count, out
        vocab, drawn = probs.shape[1], draft_probs is not None
        values, index = tile_buffers(num_rows, vocab, tile, device, copies=2)
        num_tiles = values.shape[1]
        _count_kernel[(num_rows,)](
            argmax, probs, draft_probs, tokens, seeds,
            req_idx, starts, num_new, num_draft, logits_start, sampled, count,
            int(accept_stream), k, max_len, vocab, DRAWN=drawn, COLUMNS=columns,
        )  # fmt: skip
        _resample_kernel[(num_rows, num_tiles)](
            probs, draft_probs, tokens, seeds,
            req_idx, starts, num_new, num_draft, logits_start, sampled, count, values, index,
            int(target_stream), k, max_len, vocab, num_rows, num_tiles, DRAWN=drawn, BLOCK=tile, num_warps=WARPS,
        )  # fmt: skip
        _write_kernel[(num_rows,)](
            argmax, tokens, computed,
            req_idx, starts, num_new, logits_start, sampled, count, values, index, out,
            k, max_len, num_rows, num_tiles, COLUMNS=columns, TILES=triton.next_power_of_2(num_tiles),
        )  # fmt: skip
        return count, out
