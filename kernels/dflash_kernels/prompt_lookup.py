"""Drafts that are looked up in a request's own tokens: what followed when its last tokens occurred before.

A row's text ends at its anchor, the last token. Of the n-grams that end at the anchor, n from `max_ngram` down to
`min_ngram`, the longest that ends at an earlier position as well is taken, at the latest such position; the two may
overlap. The drafts are the tokens behind that position. Where the text ends first, it goes on as if it repeated with
the period between the two: draft j is draft j - period. Where nothing matches the period is 1, the anchor repeated.

Prompt lookup is of Saxena (2023, github.com/apoorvumang/prompt-lookup-decoding); vLLM calls the method "ngram". State,
padding and references are as in `prepare_step`.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


def prompt_lookup_reference(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    req_idx: torch.Tensor,
    num_drafts: torch.Tensor,
    k: int,
    min_ngram: int,
    max_ngram: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafts of each row, int64 `[R, k]`, 0 for a row that does not draft; and the tokens that matched, float32
    `[R, k]`, the same for all of a row, 0 for no match.

    tokens: int64 `[S, max_len]`, of which nothing behind the anchor is read. computed: int32 `[S]`, the anchor's
    position; a request that has ended meanwhile may have it past `max_len`, and is taken to end there. req_idx,
    num_drafts: int32 `[R]`.
    """
    drafts = np.zeros((len(req_idx), k), dtype=np.int64)
    matched = np.zeros((len(req_idx), k), dtype=np.float32)
    requests, column = req_idx.numpy(), np.arange(k)
    anchors = np.minimum(computed.numpy()[np.maximum(requests, 0)], tokens.shape[1] - 1)
    # A row at a time, since that copies no tokens, and few comparisons reach further than the anchor itself.
    for row in ((requests >= 0) & (num_drafts.numpy() > 0)).nonzero()[0].tolist():
        text, anchor = tokens.numpy()[requests[row]], int(anchors[row])
        end, matched[row] = _match(text, anchor, min_ngram, max_ngram)
        drafts[row] = text[end + 1 + column % (anchor - end)]
    return torch.from_numpy(drafts), torch.from_numpy(matched)


def _match(text: np.ndarray, anchor: int, min_ngram: int, max_ngram: int) -> tuple[int, int]:
    """Where in `text` (int64 `[max_len]`) the longest n-gram that ends at `anchor` ended before, at the latest of
    several such positions, and its length; `anchor - 1`, a period of 1, and 0 where none did."""
    end, length = anchor - 1, 0
    # Whether the n-gram that ends at each position from n - 1 to anchor - 1 is the anchor's.
    matches = text[:anchor] == text[anchor]
    for n in range(1, max_ngram + 1):
        if n > 1:
            matches = matches[1:] & (text[: anchor - n + 1] == text[anchor - n + 1])
        found = matches.nonzero()[0]
        if len(found) == 0:
            break
        if n >= min_ngram:
            end, length = int(found[-1]) + n - 1, n
    return end, length


@cached_launches
@triton.jit
def _prompt_lookup_kernel(
    tokens_ptr, computed_ptr, req_idx_ptr, num_drafts_ptr, drafts_ptr, matched_ptr, k, max_len,
    MIN_NGRAM: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program looks up one row's drafts, BLOCK positions at a time."""
    row = tl.program_id(0)
    req_idx = tl.load(req_idx_ptr + row)
    drafts = (req_idx >= 0) & (tl.load(num_drafts_ptr + row) > 0)
    anchor = tl.minimum(tl.load(computed_ptr + req_idx, mask=drafts, other=0), max_len - 1)
    text_ptr = tokens_ptr + req_idx.to(tl.int64) * max_len
    # The longest match, the latest of equals: its length times max_len, plus where it ends; 0 for none.
    longest = tl.zeros([BLOCK], dtype=tl.int64)
    for base in range(0, anchor, BLOCK):
        end = base + tl.arange(0, BLOCK)
        matches = end < anchor
        length = tl.zeros([BLOCK], dtype=tl.int64)
        for n in tl.static_range(MAX_NGRAM):
            matches = matches & (end >= n)
            token = tl.load(text_ptr + anchor - n, mask=anchor >= n, other=-1)
            matches = matches & (tl.load(text_ptr + end - n, mask=matches, other=-1) == token)
            length += matches.to(tl.int64)
        longest = tl.maximum(longest, tl.where(length >= MIN_NGRAM, length * max_len + end, 0))
    match = tl.max(longest, axis=0)
    period = tl.where(match > 0, anchor - match % max_len, 1)
    column = tl.arange(0, COLUMNS)
    position = anchor - period + 1 + column % period
    found = tl.load(text_ptr + position, mask=column < tl.where(drafts, k, 0), other=0)
    tl.store(drafts_ptr + row * k + column, found, mask=column < k)
    matched = (tl.where(drafts, match // max_len, 0) + tl.zeros_like(column)).to(tl.float32)
    tl.store(matched_ptr + row * k + column, matched, mask=column < k)


def prompt_lookup(
    tokens: torch.Tensor,
    computed: torch.Tensor,
    req_idx: torch.Tensor,
    num_drafts: torch.Tensor,
    k: int,
    min_ngram: int,
    max_ngram: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `prompt_lookup_reference`, for contiguous tensors."""
    num_rows = len(req_idx)
    drafts = torch.empty(num_rows, k, dtype=torch.int64, device=tokens.device)
    matched = torch.empty(num_rows, k, dtype=torch.float32, device=tokens.device)
    if num_rows > 0 and k > 0:
        _prompt_lookup_kernel[(num_rows,)](
            tokens, computed, req_idx, num_drafts, drafts, matched, k, tokens.shape[1],
            MIN_NGRAM=min_ngram, MAX_NGRAM=max_ngram, BLOCK=1024, COLUMNS=triton.next_power_of_2(k),
        )  # fmt: skip
    return drafts, matched
