"""Around the drafter, on the device: which context K/V is written, what the drafter runs, where its drafts go.

Called by `worker.step_ops`. Tables and padding are those of `prepare_step`. By now `computed` counts the accepted
drafts, so it is the anchor's position.
"""

from __future__ import annotations

import torch

from dflash_kernels.argmax import TILE, WARPS
from dflash_kernels.prepare_step import covered_lens, look_up_reference

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the references only
    triton = None

if triton is not None:
    from dflash_kernels.prepare_step import covered_len, look_up


def inject_slots_reference(
    slots: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, computed: torch.Tensor, token_row: torch.Tensor
) -> torch.Tensor:
    """`slots` with -1 where the token's position is not final, so that rejected drafts write no context K/V (trap 3).

    slots, positions: int64 `[T]`. table: int32 `[R]`. computed: int32 `[S]`. token_row: int32 `[T]`, -1 for padding,
    whose slot is -1 already.
    """
    row = table.clamp(min=0)[token_row.clamp(min=0)]
    return torch.where(positions < computed[row], slots, -1)


def prepare_draft_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    table: torch.Tensor,
    num_next: torch.Tensor,
    k: int,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[anchor, mask x num_next]` for each row that drafts (`num_next` > 0): ids, positions, slots int64 `[R, 1 + k]`,
    query_lens (`1 + num_next`, else 0), seq_lens int32 `[R]`. State as in `prepare_reference`."""
    index = table.clamp(min=0)
    drafts = (table >= 0) & (num_next > 0)
    query_lens = torch.where(drafts, num_next + 1, 0)
    anchor = torch.where(drafts, computed[index], 0)
    covered = covered_lens(tokens, num_blocks, block_size, table)
    seq_lens = torch.minimum(anchor + query_lens, covered).int()

    column = torch.arange(k + 1, device=tokens.device)
    positions = anchor[:, None] + column
    inside = (column < query_lens[:, None]) & (positions < covered[:, None])
    ids, positions, slots = look_up_reference(tokens, blocks, block_size, index[:, None], positions, inside)
    ids = torch.where(inside & (column > 0), mask_token_id, ids)
    return ids, positions, slots, query_lens, seq_lens


def store_drafts_reference(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    table: torch.Tensor,
    num_next: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    """Write `num_next` (int32 `[R]`) of each row's `drafts` (int64 `[R, k]`) behind its anchor in `tokens`; what would
    lie past the width of `tokens` is dropped. State as in `prepare_reference`; no row of state occurs twice."""
    index = table.clamp(min=0)
    column = torch.arange(drafts.shape[1], device=tokens.device)
    positions = computed[index][:, None].long() + 1 + column
    kept = (table >= 0)[:, None] & (column < num_next[:, None])
    write_tokens_reference(tokens, index[:, None], positions, drafts, kept)


def write_tokens_reference(
    tokens: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, kept: torch.Tensor
) -> None:
    """Set `tokens[table, positions]` to `values` where `kept` and within the width; the places written are distinct.

    Adds differences, so that what is not kept can aim anywhere: it adds 0.
    """
    kept = kept & (positions < tokens.shape[1])
    places = torch.where(kept, table.long() * tokens.shape[1] + positions, 0).flatten()
    flat = tokens.view(-1)
    flat.index_add_(0, places, torch.where(kept.flatten(), values.flatten() - flat[places], 0))


def store_probs_reference(
    draft_probs: torch.Tensor, table: torch.Tensor, num_next: torch.Tensor, sampled: torch.Tensor, probs: torch.Tensor
) -> None:
    """Keep what drafts were drawn from: the first `num_next` of each row's `probs` (float32 `[R, k', vocab]`, k' at
    most k) go to `draft_probs` (float32 `[S, k, vocab]`) for rows with `sampled` (int32 `[R]`) not 0."""
    real = table >= 0
    # Rows of padding do once more what the first real row does; without one, all of them write what is there.
    source = torch.where(real, torch.arange(len(table), device=table.device), real.int().argmax())
    table, probs = table.clamp(min=0)[source], probs[source]
    column = torch.arange(probs.shape[1], device=table.device)
    kept = (real & (sampled > 0))[source][:, None] & (column < num_next[source][:, None])
    places = table[:, None].long(), column[None, :]
    draft_probs[places] = torch.where(kept[..., None], probs, draft_probs[places])


if triton is not None:

    @triton.jit(do_not_specialize=["num_tokens"])
    def _inject_slots_kernel(
        slots_ptr, positions_ptr, table_ptr, computed_ptr, token_row_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr
    ):
        """One program decides on BLOCK tokens."""
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = token < num_tokens
        row = tl.load(token_row_ptr + token, mask=inside, other=-1)
        table = tl.load(table_ptr + row, mask=row >= 0, other=-1)
        computed = tl.load(computed_ptr + table, mask=table >= 0, other=0)
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        slots = tl.load(slots_ptr + token, mask=inside, other=-1)
        tl.store(out_ptr + token, tl.where(position < computed, slots, -1), mask=inside)

    def inject_slots(
        slots: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        computed: torch.Tensor,
        token_row: torch.Tensor,
    ) -> torch.Tensor:
        """As `inject_slots_reference`, for contiguous tensors."""
        out = torch.empty_like(slots)
        block = 256
        if len(slots) > 0:
            grid = (triton.cdiv(len(slots), block),)
            _inject_slots_kernel[grid](slots, positions, table, computed, token_row, out, len(slots), BLOCK=block)
        return out

    @triton.jit
    def _prepare_draft_kernel(
        tokens_ptr, blocks_ptr, num_blocks_ptr, computed_ptr, table_ptr, num_next_ptr,
        ids_ptr, positions_ptr, slots_ptr, query_lens_ptr, seq_lens_ptr,
        mask_token_id, block_size, max_len, max_blocks, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """One program prepares one row's WIDTH queries."""
        row = tl.program_id(0)
        table = tl.load(table_ptr + row)
        num_next = tl.load(num_next_ptr + row)
        drafts = (table >= 0) & (num_next > 0)
        query_len = tl.where(drafts, num_next + 1, 0)
        anchor = tl.load(computed_ptr + table, mask=drafts, other=0)
        room = covered_len(num_blocks_ptr, table, block_size, max_len)

        column = tl.arange(0, COLUMNS)
        positions = anchor + column
        covered = (column < query_len) & (positions < room)
        tables = table + tl.zeros_like(column)
        ids, positions, slots = look_up(
            tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, tables, positions, covered
        )
        ids = tl.where(covered & (column > 0), mask_token_id, ids)
        place = row * WIDTH + column
        tl.store(ids_ptr + place, ids, mask=column < WIDTH)
        tl.store(positions_ptr + place, positions, mask=column < WIDTH)
        tl.store(slots_ptr + place, slots, mask=column < WIDTH)
        tl.store(query_lens_ptr + row, query_len)
        tl.store(seq_lens_ptr + row, tl.minimum(anchor + query_len, room))

    def prepare_draft(
        tokens: torch.Tensor,
        blocks: torch.Tensor,
        num_blocks: torch.Tensor,
        computed: torch.Tensor,
        block_size: int,
        table: torch.Tensor,
        num_next: torch.Tensor,
        k: int,
        mask_token_id: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `prepare_draft_reference`, for contiguous tensors."""
        num_rows, device = len(table), tokens.device
        ids, positions, slots = (torch.empty(num_rows, k + 1, dtype=torch.int64, device=device) for _ in range(3))
        query_lens, seq_lens = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
        if num_rows > 0:
            _prepare_draft_kernel[(num_rows,)](
                tokens, blocks, num_blocks, computed, table, num_next,
                ids, positions, slots, query_lens, seq_lens,
                mask_token_id, block_size, tokens.shape[1], blocks.shape[1],
                WIDTH=k + 1, COLUMNS=triton.next_power_of_2(k + 1),
            )  # fmt: skip
        return ids, positions, slots, query_lens, seq_lens

    @triton.jit
    def _store_drafts_kernel(
        tokens_ptr, computed_ptr, table_ptr, num_next_ptr, drafts_ptr, k, max_len, COLUMNS: tl.constexpr
    ):
        """One program writes one row's drafts."""
        row = tl.program_id(0)
        table = tl.load(table_ptr + row)
        if table >= 0:
            column = tl.arange(0, COLUMNS)
            num_next = tl.minimum(tl.load(num_next_ptr + row), k)
            positions = tl.load(computed_ptr + table) + 1 + column
            kept = (column < num_next) & (positions < max_len)
            drafts = tl.load(drafts_ptr + row * k + column, mask=kept, other=0)
            tl.store(tokens_ptr + table.to(tl.int64) * max_len + positions, drafts, mask=kept)

    def store_drafts(
        tokens: torch.Tensor,
        computed: torch.Tensor,
        table: torch.Tensor,
        num_next: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """As `store_drafts_reference`, for contiguous tensors."""
        num_rows, k = drafts.shape
        if num_rows > 0 and k > 0:
            _store_drafts_kernel[(num_rows,)](
                tokens, computed, table, num_next, drafts, k, tokens.shape[1], COLUMNS=triton.next_power_of_2(k)
            )

    @triton.jit
    def _store_probs_kernel(
        kept_ptr, table_ptr, num_next_ptr, sampled_ptr, probs_ptr, width, k, vocab, BLOCK: tl.constexpr
    ):
        """One program copies one tile of one draft's distribution."""
        row, column = tl.program_id(0) // width, tl.program_id(0) % width
        table = tl.load(table_ptr + row)
        if (table >= 0) & (tl.load(sampled_ptr + row) > 0) & (column < tl.load(num_next_ptr + row)):
            offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            source = probs_ptr + tl.program_id(0).to(tl.int64) * vocab
            probs = tl.load(source + offsets, mask=offsets < vocab)
            tl.store(kept_ptr + (table.to(tl.int64) * k + column) * vocab + offsets, probs, mask=offsets < vocab)

    def store_probs(
        draft_probs: torch.Tensor,
        table: torch.Tensor,
        num_next: torch.Tensor,
        sampled: torch.Tensor,
        probs: torch.Tensor,
    ) -> None:
        """As `store_probs_reference`, for contiguous tensors."""
        num_rows, width, vocab = probs.shape
        grid = (num_rows * width, triton.cdiv(vocab, TILE))
        if grid[0] > 0:
            _store_probs_kernel[grid](
                draft_probs, table, num_next, sampled, probs, width, draft_probs.shape[1], vocab,
                BLOCK=TILE, num_warps=WARPS,
            )  # fmt: skip
