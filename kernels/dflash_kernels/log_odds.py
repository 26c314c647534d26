"""How sure a model is of tokens: the log-odds of one token in each row of logits, by tiles as in `argmax`."""

from __future__ import annotations

import numpy as np
import torch

from dflash_kernels.argmax import TILE, WARPS
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Beyond this a token is as good as certain.
MAX_LOG_ODDS = 8.0
# Of the logits that the reference takes at a time: the C library keeps arrays of this size for the next call.
PART_BYTES = 96 << 10


def log_odds_reference(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) for the probability p, at temperature 1, of the column `token_ids` (int64 `[n]`) in each row of
    `logits` `[n, vocab]`: float32 `[n]`, within `MAX_LOG_ODDS` of 0. Where it is not a number, `-MAX_LOG_ODDS`."""
    # Some rows at a time: an array of all would be mapped anew for each call, page by page.
    num_rows = max(1, PART_BYTES // (4 * logits.shape[1]))
    parts = zip(logits.split(num_rows), token_ids.split(num_rows), strict=True)
    surprisal = torch.cat([-part.float().log_softmax(dim=-1).gather(1, ids[:, None])[:, 0] for part, ids in parts])
    # In numpy, whose calls cost less: these arrays are small.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_odds = -np.log(np.expm1(np.maximum(surprisal.cpu().numpy(), 0)))
    log_odds = np.where(np.isnan(log_odds), -MAX_LOG_ODDS, log_odds).clip(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    return torch.from_numpy(log_odds.astype(np.float32)).to(logits.device)


@cached_launches
@triton.jit
def _tile_kernel(logits_ptr, ids_ptr, max_ptr, sum_ptr, vocab, stride, num_tiles, BLOCK: tl.constexpr):
    """One program adds up the probabilities of one tile of one row but the token's, relative to the largest."""
    row, tile = tl.program_id(0), tl.program_id(1)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    others = (offsets < vocab) & (offsets != tl.load(ids_ptr + row))
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + offsets, mask=others, other=float("-inf"))
    logits = logits.to(tl.float32)
    largest = tl.max(logits, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(max_ptr + place, largest)
    tl.store(sum_ptr + place, tl.sum(tl.exp(logits - shift), axis=0))


@cached_launches
@triton.jit
def _reduce_kernel(
    logits_ptr, ids_ptr, max_ptr, sum_ptr, out_ptr, stride, num_tiles, MOST: tl.constexpr, TILES: tl.constexpr
):
    """One program adds up the tiles of one row."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    largest = tl.load(max_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_tiles + tiles, mask=inside, other=0.0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(largest - shift), axis=0)
    logit = tl.load(logits_ptr + row * stride + tl.load(ids_ptr + row)).to(tl.float32)
    log_odds = logit - shift - tl.log(tl.maximum(total, 1e-30))
    log_odds = tl.where(log_odds == log_odds, log_odds, -MOST)
    tl.store(out_ptr + row, tl.minimum(tl.maximum(log_odds, -MOST), MOST))


def log_odds(logits: torch.Tensor, token_ids: torch.Tensor, tile: int = TILE) -> torch.Tensor:
    """As `log_odds_reference`, for `logits` whose rows are contiguous."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    num_tiles = triton.cdiv(vocab, tile)
    # Tensors of their own: views of one would differ in alignment, and each kind would be compiled anew.
    largest, sums = (torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device) for _ in range(2))
    if num_rows > 0:
        _tile_kernel[(num_rows, num_tiles)](
            logits, token_ids, largest, sums, vocab, logits.stride(0), num_tiles, BLOCK=tile, num_warps=WARPS
        )
        _reduce_kernel[(num_rows,)](
            logits, token_ids, largest, sums, out, logits.stride(0), num_tiles,
            MOST=MAX_LOG_ODDS, TILES=triton.next_power_of_2(num_tiles),
        )  # fmt: skip
    return out
