"""Decide on the device which drafts stand and which token follows, and advance the requests' state.

Called by `worker.step_ops`. Greedy rows compare drafts with the target's most likely tokens; sampled rows do rejection
sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): draft d from q stands with probability
min(1, p(d) / q(d)), the first that falls is replaced by a draw from max(p - q, 0), and if all stand one more is drawn
from p. Tables and padding are those of `prepare_step`.
"""

from __future__ import annotations

import torch

from dflash_kernels.argmax import WARPS
from dflash_kernels.draw import RACE_TILE, draw_reference
from dflash_kernels.prepare_draft import write_tokens_reference
from dflash_kernels.random_numbers import uniform

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the reference only
    triton = None

if triton is not None:
    from dflash_kernels.argmax import best_of_tiles, tile_buffers
    from dflash_kernels.draw import race
    from dflash_kernels.random_numbers import state_bits, uniform_of


def residual_reference(p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), float32 `[n, vocab]`, for `p` and `q` alike; q None: all on the `drafts` (int64 `[n]`).

    p and q equal up to rounding leave nothing of p - q; then p itself is the limit.
    """
    left = p.scatter(1, drafts[:, None], 0.0) if q is None else (p - q).clamp_(min=0.0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0.0, left, p)


def accept_reference(
    best: torch.Tensor,
    probs: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    tokens: torch.Tensor,
    computed: torch.Tensor,
    seeds: torch.Tensor,
    k: int,
    table: torch.Tensor,
    starts: torch.Tensor,
    num_new: torch.Tensor,
    num_draft: torch.Tensor,
    dist_start: torch.Tensor,
    sampled: torch.Tensor,
    accept_stream: int,
    target_stream: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts of each row, int32 `[R]`, and its new tokens, int64 `[R, k + 1]`, 0 behind the last of them.

    best: int64 `[D]`, the target's most likely tokens. probs: float32 `[D, vocab]`, what sampled rows choose from; None
    when every row is greedy. draft_probs: float32 `[S, k, vocab]`, what the drafts were drawn from; None when they were
    the drafter's most likely tokens, so that q is all on the draft. tokens: int64 `[S, max_len]`, in which the drafts
    lie, and where the token after the accepted ones is written. computed: int32 `[S]`, set to `starts + num_new +
    count`. seeds: int64 `[S]`. table, starts, num_new, num_draft, dist_start, sampled: int32 `[R]`.

    A row with dist_start -1 does not sample: nothing is accepted, and `computed` advances by `num_new`.
    """
    if k == 0:
        draft_probs = None
    index = table.clamp(min=0)
    first = (starts + num_new).long()
    samples = dist_start >= 0
    column = torch.arange(k + 1, device=tokens.device)
    positions = first[:, None] + column
    within = positions < tokens.shape[1]
    drafts = torch.where(within, tokens[index[:, None], torch.where(within, positions, 0)], 0)
    if len(best) == 0:
        best = best.new_zeros(1)
    dist = (dist_start.clamp(min=0)[:, None] + column).clamp(max=len(best) - 1)

    choices = best[dist]
    stands = drafts == choices
    if probs is not None:
        p = probs[dist, drafts]
        q = 1.0 if draft_probs is None else draft_probs[index[:, None], column.clamp(max=k - 1), drafts]
        numbers = uniform(seeds[index][:, None].expand_as(positions), positions, accept_stream)
        stands = torch.where(sampled[:, None] > 0, numbers * q < p, stands)
    stands = stands & (column < num_draft[:, None])
    count = stands.long().cumprod(dim=1).sum(dim=1)

    following = choices.gather(1, count[:, None]).squeeze(1)
    if probs is not None:
        weights = probs[dist.gather(1, count[:, None]).squeeze(1)]
        rejected = drafts.gather(1, count[:, None]).squeeze(1)
        q_rows = None if draft_probs is None else draft_probs[index, count.clamp(max=k - 1)]
        fell = (count < num_draft)[:, None]
        weights = torch.where(fell, residual_reference(weights, q_rows, rejected), weights)
        drawn = draw_reference(weights, seeds[index], first + count, target_stream)
        following = torch.where(sampled > 0, drawn, following)

    is_accepted, is_next = column < count[:, None], (column == count[:, None]) & samples[:, None]
    new_tokens = torch.where(is_accepted, drafts, torch.where(is_next, following[:, None], 0))
    real = table >= 0
    write_tokens_reference(tokens, index, first + count, following, real & samples)
    change = torch.where(real, first + count - computed[index], 0).int()
    computed.index_add_(0, index, change)
    return count.int(), new_tokens


if triton is not None:

    @triton.jit
    def _read_drafts(tokens_ptr, table, first, column, max_len):
        """The drafts at `first + column`, 0 past the width of `tokens` and for a padding row."""
        positions = first + column
        kept = positions < tl.where(table >= 0, max_len, 0)
        return tl.load(tokens_ptr + table.to(tl.int64) * max_len + positions, mask=kept, other=0)

    @triton.jit
    def _leading(stands, column, num_draft):
        """How many drafts stand before the first that falls; `stands` and `column` are vectors."""
        falls = (column >= num_draft) | (stands == 0)
        return tl.min(tl.where(falls, column, num_draft), axis=0)

    @triton.jit
    def _settle(
        tokens_ptr, computed_ptr, count_ptr, out_ptr, row, table, first, dist, count, following, k, max_len,
        COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Write what a row has come to: its new tokens, and its state."""
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, table, first, column, max_len)
        following = tl.where(dist >= 0, following, 0)
        new_tokens = tl.where(column < count, drafts, tl.where(column == count, following, 0))
        tl.store(count_ptr + row, count)
        tl.store(out_ptr + row * (k + 1) + column, new_tokens, mask=column <= k)
        end = first + count
        if table >= 0:
            tl.store(computed_ptr + table, end)
            if (dist >= 0) & (end < max_len):
                tl.store(tokens_ptr + table.to(tl.int64) * max_len + end, following)

    @triton.jit
    def _accept_greedy_kernel(
        best_ptr, tokens_ptr, computed_ptr, table_ptr, starts_ptr, num_new_ptr, num_draft_ptr, dist_start_ptr,
        count_ptr, out_ptr, k, max_len, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program decides on one row."""
        row = tl.program_id(0)
        table, dist = tl.load(table_ptr + row), tl.load(dist_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        num_draft = tl.where(dist >= 0, tl.load(num_draft_ptr + row), 0)
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, table, first, column, max_len)
        best = tl.load(best_ptr + dist + column, mask=column < num_draft, other=-1)
        count = _leading(drafts == best, column, num_draft)
        following = tl.load(best_ptr + dist + count, mask=dist >= 0, other=0)
        _settle(
            tokens_ptr, computed_ptr, count_ptr, out_ptr, row, table, first, dist, count, following, k, max_len, COLUMNS
        )

    @triton.jit(do_not_specialize=["accept_stream"])
    def _count_kernel(
        best_ptr, probs_ptr, draft_probs_ptr, tokens_ptr, seeds_ptr,
        table_ptr, starts_ptr, num_new_ptr, num_draft_ptr, dist_start_ptr, sampled_ptr, count_ptr,
        accept_stream, k, max_len, vocab, DRAWN: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program counts the drafts of one row that stand."""
        row = tl.program_id(0)
        table, dist = tl.load(table_ptr + row), tl.load(dist_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        num_draft = tl.where(dist >= 0, tl.load(num_draft_ptr + row), 0)
        column = tl.arange(0, COLUMNS)
        drafts = _read_drafts(tokens_ptr, table, first, column, max_len)
        judged = column < num_draft
        if tl.load(sampled_ptr + row) > 0:
            p = tl.load(probs_ptr + (dist + column).to(tl.int64) * vocab + drafts, mask=judged, other=0.0)
            numbers = uniform_of(
                state_bits(tl.load(seeds_ptr + table, mask=table >= 0, other=0), first + column, accept_stream)
            )
            if DRAWN:
                place = (table.to(tl.int64) * k + column) * vocab + drafts
                numbers *= tl.load(draft_probs_ptr + place, mask=judged, other=1.0).to(tl.float64)
            count = _leading(numbers < p.to(tl.float64), column, num_draft)
        else:
            best = tl.load(best_ptr + dist + column, mask=judged, other=-1)
            count = _leading(drafts == best, column, num_draft)
        tl.store(count_ptr + row, count)

    @triton.jit(do_not_specialize=["target_stream", "num_rows"])
    def _replace_kernel(
        probs_ptr, draft_probs_ptr, tokens_ptr, seeds_ptr,
        table_ptr, starts_ptr, num_new_ptr, num_draft_ptr, dist_start_ptr, sampled_ptr, count_ptr, value_ptr, index_ptr,
        target_stream, k, max_len, vocab, num_rows, num_tiles, DRAWN: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program runs the race for the token that follows, in one tile of one sampled row.

        Twice: by the residual, and by p for the case that nothing is left of it, which only all tiles together know.
        """
        row, tile = tl.program_id(0), tl.program_id(1)
        table, dist = tl.load(table_ptr + row), tl.load(dist_start_ptr + row)
        if (dist >= 0) & (tl.load(sampled_ptr + row) > 0):
            count = tl.load(count_ptr + row)
            end = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row) + count
            state = state_bits(tl.load(seeds_ptr + table), end, target_stream)
            offsets = tile * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < vocab
            p = tl.load(probs_ptr + (dist + count).to(tl.int64) * vocab + offsets, mask=inside, other=0.0)
            left = p
            if count < tl.load(num_draft_ptr + row):
                if DRAWN:
                    place = (table.to(tl.int64) * k + count) * vocab + offsets
                    left = tl.maximum(p - tl.load(draft_probs_ptr + place, mask=inside, other=0.0), 0.0)
                else:
                    left = tl.where(offsets == _read_drafts(tokens_ptr, table, end, 0, max_len), 0.0, p)
            best, index = race(left, state, offsets, vocab)
            place = row.to(tl.int64) * num_tiles + tile
            tl.store(value_ptr + place, best)
            tl.store(index_ptr + place, index)
            best, index = race(p, state, offsets, vocab)
            place = (num_rows + row).to(tl.int64) * num_tiles + tile
            tl.store(value_ptr + place, best)
            tl.store(index_ptr + place, index)

    @triton.jit(do_not_specialize=["num_rows"])
    def _settle_kernel(
        best_ptr, tokens_ptr, computed_ptr,
        table_ptr, starts_ptr, num_new_ptr, dist_start_ptr, sampled_ptr, count_ptr, value_ptr, index_ptr, out_ptr,
        k, max_len, num_rows, num_tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        """One program finds one row's following token and writes what the row has come to."""
        row = tl.program_id(0)
        table, dist = tl.load(table_ptr + row), tl.load(dist_start_ptr + row)
        first = tl.load(starts_ptr + row) + tl.load(num_new_ptr + row)
        count = tl.load(count_ptr + row)
        following = tl.load(best_ptr + dist + count, mask=dist >= 0, other=0)
        if (dist >= 0) & (tl.load(sampled_ptr + row) > 0):
            value, following = best_of_tiles(value_ptr, index_ptr, row, num_tiles, TILES)
            if value < 0.0:
                _, following = best_of_tiles(value_ptr, index_ptr, num_rows + row, num_tiles, TILES)
        _settle(
            tokens_ptr, computed_ptr, count_ptr, out_ptr, row, table, first, dist, count, following, k, max_len, COLUMNS
        )

    def accept(
        best: torch.Tensor,
        probs: torch.Tensor | None,
        draft_probs: torch.Tensor | None,
        tokens: torch.Tensor,
        computed: torch.Tensor,
        seeds: torch.Tensor,
        k: int,
        table: torch.Tensor,
        starts: torch.Tensor,
        num_new: torch.Tensor,
        num_draft: torch.Tensor,
        dist_start: torch.Tensor,
        sampled: torch.Tensor,
        accept_stream: int,
        target_stream: int,
        tile: int = RACE_TILE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `accept_reference`, up to the rounding of a logarithm, for contiguous tensors."""
        num_rows, device, max_len = len(table), tokens.device, tokens.shape[1]
        count = torch.empty(num_rows, dtype=torch.int32, device=device)
        out = torch.empty(num_rows, k + 1, dtype=torch.int64, device=device)
        if num_rows == 0:
            return count, out
        columns = triton.next_power_of_2(k + 1)
        if probs is None or len(probs) == 0:
            _accept_greedy_kernel[(num_rows,)](
                best, tokens, computed, table, starts, num_new, num_draft, dist_start, count, out,
                k, max_len, COLUMNS=columns,
            )  # fmt: skip
            return count, out
        vocab, drawn = probs.shape[1], draft_probs is not None
        values, index = tile_buffers(num_rows, vocab, tile, device, copies=2)
        num_tiles = values.shape[1]
        _count_kernel[(num_rows,)](
            best, probs, draft_probs, tokens, seeds,
            table, starts, num_new, num_draft, dist_start, sampled, count,
            int(accept_stream), k, max_len, vocab, DRAWN=drawn, COLUMNS=columns,
        )  # fmt: skip
        _replace_kernel[(num_rows, num_tiles)](
            probs, draft_probs, tokens, seeds,
            table, starts, num_new, num_draft, dist_start, sampled, count, values, index,
            int(target_stream), k, max_len, vocab, num_rows, num_tiles, DRAWN=drawn, BLOCK=tile, num_warps=WARPS,
        )  # fmt: skip
        _settle_kernel[(num_rows,)](
            best, tokens, computed,
            table, starts, num_new, dist_start, sampled, count, values, index, out,
            k, max_len, num_rows, num_tiles, COLUMNS=columns, TILES=triton.next_power_of_2(num_tiles),
        )  # fmt: skip
        return count, out
