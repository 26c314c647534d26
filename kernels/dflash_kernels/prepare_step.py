"""From a step's layout and the requests' state on the device to what the target runs. Called by `worker.step_ops`.

A request's state is a row of each table; a step's row names it by `table`, -1 for a padding row. A token is *covered*
when a block of its row and the width of `tokens` hold its position: one that is not (its request has ended meanwhile)
gets slot -1, id 0 and position 0, as does a padding token.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU needs the references only
    triton = None


def covered_lens(tokens: torch.Tensor, num_blocks: torch.Tensor, block_size: int, table: torch.Tensor) -> torch.Tensor:
    """Positions that the blocks of each row hold, 0 for a padding row: int64 `[R]`. See `prepare_reference`."""
    covered = (num_blocks[table.clamp(min=0)].long() * block_size).clamp(max=tokens.shape[1])
    return torch.where(table >= 0, covered, 0)


def look_up_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    block_size: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    covered: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and slots, int64 `[n]`, of the int64 `positions` of rows `table` (int32, at least 0), with
    padding where not `covered` (bool `[n]`)."""
    positions = torch.where(covered, positions, 0)
    ids = torch.where(covered, tokens[table, positions], 0)
    block = torch.div(positions, block_size, rounding_mode="floor")
    slots = blocks[table, block].long() * block_size + (positions - block * block_size)
    return ids, positions, torch.where(covered, slots, -1)


def prepare_reference(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    computed: torch.Tensor,
    block_size: int,
    table: torch.Tensor,
    start: torch.Tensor,
    uncertain: torch.Tensor,
    query_start: torch.Tensor,
    query_lens: torch.Tensor,
    token_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the target runs: ids, positions, slots int64 `[T]`; starts, seq_lens int32 `[R]`, 0 for padding rows.

    tokens: int64 `[S, max_len]`. blocks: int32 `[S, max_blocks]`. num_blocks, computed: int32 `[S]`. table, start,
    uncertain, query_start, query_lens: int32 `[R]`. token_row: int32 `[T]`, -1 for padding.

    A row starts at `start`, or at its `computed` where `uncertain` is not 0. A row's length stops at its blocks, which
    hold at least `query_lens` positions (RESERVE), so each of its queries sees a key.
    """
    starts = torch.where(uncertain > 0, computed[table.clamp(min=0)], start)
    starts = torch.where(table >= 0, starts, 0)
    covered = covered_lens(tokens, num_blocks, block_size, table)
    seq_lens = torch.minimum(starts + query_lens, covered).int()

    row = token_row.clamp(min=0)
    index = torch.arange(len(token_row), device=tokens.device)
    positions = starts[row] + index - query_start[row]
    inside = (token_row >= 0) & (positions < covered[row])
    return *look_up_reference(tokens, blocks, block_size, table.clamp(min=0)[row], positions, inside), starts, seq_lens


if triton is not None:

    @triton.jit
    def covered_len(num_blocks_ptr, table, block_size, max_len):
        """Positions that the blocks of state row `table` (-1: padding, 0 positions) hold: `covered_lens`."""
        num_blocks = tl.load(num_blocks_ptr + table, mask=table >= 0, other=0)
        return tl.minimum(num_blocks * block_size, max_len)

    @triton.jit
    def look_up(tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, table, positions, covered):
        """As `look_up_reference`, with int32 positions; returns int64."""
        positions = tl.where(covered, positions, 0)
        row = table.to(tl.int64)
        ids = tl.load(tokens_ptr + row * max_len + positions, mask=covered, other=0)
        block = positions // block_size
        block_id = tl.load(blocks_ptr + row * max_blocks + block, mask=covered, other=0).to(tl.int64)
        slots = tl.where(covered, block_id * block_size + (positions - block * block_size), -1)
        return ids, positions.to(tl.int64), slots

    @triton.jit
    def _row_start(start_ptr, uncertain_ptr, computed_ptr, row, table, inside):
        """Where a row really starts; 0 for padding (`table` -1)."""
        real = inside & (table >= 0)
        start = tl.load(start_ptr + row, mask=real, other=0)
        uncertain = tl.load(uncertain_ptr + row, mask=real, other=0)
        computed = tl.load(computed_ptr + table, mask=real & (uncertain > 0), other=0)
        return tl.where(uncertain > 0, computed, start)

    @triton.jit(do_not_specialize=["num_tokens", "num_rows"])
    def _prepare_kernel(
        tokens_ptr, blocks_ptr, num_blocks_ptr, computed_ptr,
        table_ptr, start_ptr, uncertain_ptr, query_start_ptr, query_lens_ptr, token_row_ptr,
        ids_ptr, positions_ptr, slots_ptr, starts_ptr, seq_lens_ptr,
        num_tokens, num_rows, block_size, max_len, max_blocks, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Programs prepare BLOCK tokens each; those behind the last token prepare BLOCK rows each."""
        token_programs = tl.cdiv(num_tokens, BLOCK)
        program = tl.program_id(0)
        if program < token_programs:
            token = program * BLOCK + tl.arange(0, BLOCK)
            inside = token < num_tokens
            row = tl.load(token_row_ptr + token, mask=inside, other=-1)
            real = row >= 0
            table = tl.load(table_ptr + row, mask=real, other=-1)
            start = _row_start(start_ptr, uncertain_ptr, computed_ptr, row, table, real)
            position = start + token - tl.load(query_start_ptr + row, mask=real, other=0)
            room = covered_len(num_blocks_ptr, table, block_size, max_len)
            ids, positions, slots = look_up(
                tokens_ptr, blocks_ptr, block_size, max_len, max_blocks, table, position, position < room
            )
            tl.store(ids_ptr + token, ids, mask=inside)
            tl.store(positions_ptr + token, positions, mask=inside)
            tl.store(slots_ptr + token, slots, mask=inside)
        else:
            row = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
            inside = row < num_rows
            table = tl.load(table_ptr + row, mask=inside, other=-1)
            start = _row_start(start_ptr, uncertain_ptr, computed_ptr, row, table, inside)
            end = start + tl.load(query_lens_ptr + row, mask=inside, other=0)
            room = covered_len(num_blocks_ptr, table, block_size, max_len)
            tl.store(starts_ptr + row, start, mask=inside)
            tl.store(seq_lens_ptr + row, tl.minimum(end, room), mask=inside)

    def prepare(
        tokens: torch.Tensor,
        blocks: torch.Tensor,
        num_blocks: torch.Tensor,
        computed: torch.Tensor,
        block_size: int,
        table: torch.Tensor,
        start: torch.Tensor,
        uncertain: torch.Tensor,
        query_start: torch.Tensor,
        query_lens: torch.Tensor,
        token_row: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `prepare_reference`, for contiguous tensors."""
        num_tokens, num_rows, device = len(token_row), len(table), tokens.device
        # Tensors of their own: views of one would differ in alignment, and each kind would be compiled anew.
        ids, positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
        starts, seq_lens = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
        block = 128
        grid = (triton.cdiv(num_tokens, block) + triton.cdiv(num_rows, block),)
        if grid[0] > 0:
            _prepare_kernel[grid](
                tokens, blocks, num_blocks, computed,
                table, start, uncertain, query_start, query_lens, token_row,
                ids, positions, slots, starts, seq_lens,
                num_tokens, num_rows, block_size, tokens.shape[1], blocks.shape[1], BLOCK=block,
            )  # fmt: skip
        return ids, positions, slots, starts, seq_lens
