"""The scores that `sample` takes the largest of, for what wants more than the largest: `logits / temperature + noise`,
with the request's own Gumbel noise; the logits themselves where the temperature is 0."""

from __future__ import annotations

import torch

from dflash_kernels.argmax import WARPS
from dflash_kernels.gumbel_noise import gumbel, gumbel_reference, key_bits
from dflash_kernels.launcher import cached_launches
from dflash_kernels.sample import NOISE_AT_A_TIME, TILE
from dflash_kernels.triton_import import tl, triton


def noisy_scores_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """float32 of the shape of `logits` (`[n, vocab]`, any floating-point dtype), whose columns are token ids.

    temperature: float32 `[n]`, 0 for none. seeds, positions: int64 `[n]`, of the token that is chosen.
    """
    scores, ids = logits.to(torch.float32, copy=True), torch.arange(logits.shape[1])
    # Some rows at a time, since hashing takes several times the memory of the logits.
    for rows in (temperature != 0).nonzero()[:, 0].split(max(1, NOISE_AT_A_TIME // len(ids))):
        noise = gumbel_reference(seeds[rows], positions[rows], ids)
        scores[rows] = scores[rows].div_(temperature[rows, None]).add_(noise)
    return scores


# A view of positions may begin at any of them.
@cached_launches
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _noisy_scores_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, scores_ptr, vocab, stride, BLOCK: tl.constexpr
):
    """One program computes one tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab
    scores = tl.load(logits_ptr + row * stride + token_ids, mask=inside, other=0.0).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        key = key_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        scores = tl.div_rn(scores, temperature) + gumbel(key, token_ids.to(tl.int64))
    tl.store(scores_ptr + row * vocab + token_ids, scores, mask=inside)


def noisy_scores(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """As `noisy_scores_reference`, up to the rounding of logarithms. Rows of `logits` must be contiguous, and so
    must all others."""
    num_rows, vocab = logits.shape
    scores = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        _noisy_scores_kernel[(num_rows, triton.cdiv(vocab, TILE))](
            logits, temperature, seeds, positions, scores, vocab, logits.stride(0), BLOCK=TILE, num_warps=WARPS
        )
    return scores
