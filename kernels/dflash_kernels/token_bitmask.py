"""Hide the tokens that a grammar does not allow: logits become -inf where a packed mask has a 0.

A mask has one bit for each token, 32 in a word, the lowest bit first, as llguidance and xgrammar fill them. Packed, the
masks of a step are an eighth of a byte for each logit, which is what the copy to the device costs.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Logits that one program reads, and its warps.
TILE = 4096
WARPS = 8
BITS = 32


def num_words(vocab_size: int) -> int:
    """Words of the mask of a vocabulary."""
    return -(-vocab_size // BITS)


def apply_token_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set `logits` (`[n, vocab]`, any floating-point dtype, in place) to -inf where the mask has a 0.

    bitmask: int32 `[m, num_words(vocab)]`. rows: int32 `[m]`, the row of logits that each mask is for, no row twice;
    all other rows stay as they are.
    """
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    index, hidden = rows.long(), torch.from_numpy(bits == 0)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(hidden, float("-inf")))


@cached_launches
@triton.jit
def _apply_kernel(logits_ptr, bitmask_ptr, rows_ptr, vocab, stride, words, BLOCK: tl.constexpr):
    """One program masks one tile of one row. A tile of logits begins at a word."""
    mask_row, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + mask_row).to(tl.int64)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocab
    word = tl.load(bitmask_ptr + mask_row.to(tl.int64) * words + offsets // 32, mask=inside, other=-1)
    hidden = inside & (((word >> (offsets % 32)) & 1) == 0)
    tl.store(logits_ptr + row * stride + offsets, float("-inf"), mask=hidden)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor, tile: int = TILE) -> None:
    """As `apply_token_bitmask_reference`. Rows of `logits` must be contiguous, and so must `bitmask` and `rows`."""
    if len(rows) > 0:
        vocab = logits.shape[1]
        _apply_kernel[(len(rows), triton.cdiv(vocab, tile))](
            logits, bitmask, rows, vocab, logits.stride(0), bitmask.shape[1], BLOCK=tile, num_warps=WARPS
        )
