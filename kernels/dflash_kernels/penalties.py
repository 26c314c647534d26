"""Repetition, frequency and presence penalties, by counts of a request's tokens that stay on the device.

Each request has a row of counts, one number for each token of the vocabulary: how often the output has it, and in a
bit of its own whether the prompt has it. A step adds the tokens that are new since the row was last read. What is
counted are tokens that were accepted, never drafts, so a rejected draft leaves no trace, and a request that is taken in
again begins with zeros. Drafts are counted while the logits behind them are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Set in the count of a token that the prompt has.
IN_PROMPT = 1 << 30
# Tokens that a program counts at a time, logits that one reads, and warps.
COUNTED, TILE, WARPS = 1024, 2048, 4
# Lines of `PenalisedRows.numbers`.
NUMBERS = 5


@dataclass(frozen=True)
class PenalisedRows:
    """Rows of a step whose requests have penalties, n of them.

    numbers: int64 `[5, n]` on the device: index of the request, index of the row's entry in `positions`, tokens of the
    prompt, drafts, and the first of its `drafts + 1` rows of logits, which lie behind one another. positions: int64, of
    the token that a row's first logits decide; all tokens of the request below it are final, and the drafts lie from it
    on. most_draft: the most drafts of a row.
    """

    numbers: torch.Tensor
    positions: torch.Tensor
    most_draft: int


def count_and_penalise_reference(
    logits: torch.Tensor,
    counts: torch.Tensor,
    num_counted: torch.Tensor,
    tokens: torch.Tensor,
    penalties: torch.Tensor,
    rows: PenalisedRows,
) -> None:
    """Count the tokens below each row's position that have not been counted, in place, then apply the penalties of
    `rows`, with vLLM's formulas, to their `logits` (float32 `[D, vocab]`, in place). The logits behind drafts d1 .. di
    count these as output. No two rows have one request.

    counts: int32 `[S, vocab]`. num_counted: int32 `[S]`, tokens of each request that are in its counts. tokens: int64
    `[S, max_len]`. penalties: float32 `[S, 3]`, repetition, frequency, presence.
    """
    positions, all_counted = rows.positions.numpy(), num_counted.numpy()
    for index, entry, prompt_len in rows.numbers[:3].T.tolist():
        begin, end = int(all_counted[index]), min(int(positions[entry]), tokens.shape[1])
        ids, own = tokens.numpy()[index, begin:end], counts.numpy()[index]
        split = min(max(prompt_len - begin, 0), len(ids))
        own[ids[:split]] |= IN_PROMPT
        np.add.at(own, ids[split:], 1)
        all_counted[index] = max(begin, end)
    own_tokens, all_counts = tokens.numpy(), counts.numpy()
    for index, entry, _, num_draft, first in rows.numbers.T.tolist():
        position = int(positions[entry])
        at = np.minimum(np.arange(position, position + num_draft), tokens.shape[1] - 1)
        drafts = own_tokens[index, at]
        # The tokens that a penalty can change.
        ids = np.union1d(all_counts[index].nonzero()[0], drafts)
        known = all_counts[index, ids]
        count, in_prompt = known & (IN_PROMPT - 1), torch.from_numpy(known >= IN_PROMPT)
        columns = torch.from_numpy(ids)
        repetition, frequency, presence = penalties[index]
        for number in range(num_draft + 1):
            if number > 0:
                count[np.searchsorted(ids, drafts[number - 1])] += 1
            times = torch.from_numpy(count).float()
            values = logits[first + number].index_select(0, columns)
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(in_prompt | (times > 0), repeated, values)
            logits[first + number].index_copy_(0, columns, values - frequency * times - presence * (times > 0))


@cached_launches
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions_ptr"])
def _count_tokens_kernel(
    counts_ptr, num_counted_ptr, tokens_ptr, numbers_ptr, positions_ptr, num_rows, vocab, max_len,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program counts the tokens of one row."""
    row = tl.program_id(0)
    index = tl.load(numbers_ptr + row)
    entry = tl.load(numbers_ptr + num_rows + row)
    prompt_len = tl.load(numbers_ptr + 2 * num_rows + row)
    begin = tl.load(num_counted_ptr + index).to(tl.int64)
    end = tl.minimum(tl.load(positions_ptr + entry), max_len)
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < end
        token = tl.load(tokens_ptr + index * max_len + position, mask=inside, other=0)
        count = counts_ptr + index * vocab + token
        tl.atomic_or(count, IN_PROMPT, mask=inside & (position < prompt_len))
        tl.atomic_add(count, 1, mask=inside & (position >= prompt_len))
    # All threads have read where they begin.
    tl.debug_barrier()
    tl.store(num_counted_ptr + index, tl.maximum(begin, end).to(tl.int32))


@cached_launches
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions_ptr"])
def _penalise_kernel(
    logits_ptr, counts_ptr, tokens_ptr, penalties_ptr, numbers_ptr, positions_ptr, num_rows, vocab, max_len,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program changes one tile of one row of logits."""
    row = tl.program_id(0) % num_rows
    number = tl.program_id(0) // num_rows
    if number > tl.load(numbers_ptr + 3 * num_rows + row):
        return
    index = tl.load(numbers_ptr + row)
    entry = tl.load(numbers_ptr + num_rows + row)
    line = tl.load(numbers_ptr + 4 * num_rows + row) + number
    position = tl.load(positions_ptr + entry)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    known = tl.load(counts_ptr + index * vocab + ids, mask=inside, other=0)
    count = known & (IN_PROMPT - 1)
    for draft in range(0, number):
        place = tl.minimum(position + draft, max_len - 1)
        count += (ids == tl.load(tokens_ptr + index * max_len + place)).to(tl.int32)
    repetition = tl.load(penalties_ptr + index * 3)
    frequency = tl.load(penalties_ptr + index * 3 + 1)
    presence = tl.load(penalties_ptr + index * 3 + 2)
    values = tl.load(logits_ptr + line * vocab + ids, mask=inside, other=0.0)
    # Rounded as the reference's, so that equal logits stay equal.
    repeated = tl.where(values > 0, tl.div_rn(values, repetition + tl.zeros_like(values)), values * repetition)
    values = tl.where((known >= IN_PROMPT) | (count > 0), repeated, values)
    values = values - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    tl.store(logits_ptr + line * vocab + ids, values, mask=inside)


def count_and_penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    num_counted: torch.Tensor,
    tokens: torch.Tensor,
    penalties: torch.Tensor,
    rows: PenalisedRows,
    tile: int = TILE,
) -> None:
    """As `count_and_penalise_reference`. All tensors are contiguous."""
    num_rows, vocab, max_len = rows.numbers.shape[1], counts.shape[1], tokens.shape[1]
    _count_tokens_kernel[(num_rows,)](
        counts, num_counted, tokens, rows.numbers, rows.positions, num_rows, vocab, max_len,
        IN_PROMPT=IN_PROMPT, BLOCK=COUNTED, num_warps=WARPS,
    )  # fmt: skip
    _penalise_kernel[(num_rows * (rows.most_draft + 1), triton.cdiv(vocab, tile))](
        logits, counts, tokens, penalties, rows.numbers, rows.positions, num_rows, vocab, max_len,
        IN_PROMPT=IN_PROMPT, BLOCK=tile, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
