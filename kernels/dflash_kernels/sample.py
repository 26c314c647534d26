"""Choose a token from each row of logits: the argmax of `logits / temperature + noise`.

The noise is the request's own Gumbel noise for the position and the token (`gumbel_noise`), so a token is drawn with
its probability (the Gumbel-max trick), and which one follows from logits, temperature, seed and position alone. A
temperature of 0 is the case without noise: the argmax. Rounding in a logit, which differs between a prefix hit and a
miss, only matters where the two best scores, or a logit and the edge of a filter, are that close.
"""

from __future__ import annotations

import torch

from dflash_kernels.argmax import WARPS, argmax_in_tile, argmax_reference, reduce_tiles, tile_buffers
from dflash_kernels.gumbel_noise import gumbel, gumbel_reference, key_bits
from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Elements of one program; fewer than argmax's, since hashing takes registers.
TILE = 2048
# Elements that the reference hashes at a time.
NOISE_AT_A_TIME = 1 << 21


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    lowest_kept: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The column chosen in each row of `logits` (`[n, vocab]`, any floating-point dtype): int64 `[n]`, the lowest among
    equals.

    temperature: float32 `[n]`, 0 for the argmax. seeds, positions: int64 `[n]`, of the token that is chosen.
    lowest_kept: float32 `[n]`, logits below it are left out (`logits_filter`); None: none are. token_ids: int64
    `[vocab]`, the id whose noise each column takes; None: its own number.
    """
    values = logits.float()
    sampled = temperature.numpy().nonzero()[0]
    if len(sampled) == 0:
        return argmax_reference(values)
    if len(sampled) < len(values):
        rows = torch.from_numpy(sampled)
        lowest = None if lowest_kept is None else lowest_kept[rows]
        some = sample_reference(values[rows], temperature[rows], seeds[rows], positions[rows], lowest, token_ids)
        return argmax_reference(values).index_copy_(0, rows, some)
    scores = values / temperature[:, None]
    if lowest_kept is not None:
        scores.masked_fill_(values < lowest_kept[:, None], float("-inf"))
    ids = torch.arange(values.shape[1]) if token_ids is None else token_ids
    # Some rows at a time, since hashing takes several times the memory of the logits.
    count = max(1, NOISE_AT_A_TIME // len(ids))
    parts = zip(scores.split(count), seeds.split(count), positions.split(count), strict=True)
    return torch.cat([argmax_reference(part.add_(gumbel_reference(seed, at, ids))) for part, seed, at in parts])


# A view of positions may begin at any of them.
@cached_launches
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _sample_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, lowest_kept_ptr, token_ids_ptr,
    value_ptr, index_ptr, vocab, stride, num_tiles,
    FILTERED: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program finds the largest score in one tile of one row."""
    row, tile = tl.program_id(0), tl.program_id(1)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocab
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    scores = logits
    noisy = temperature > 0.0
    if FILTERED:
        lowest_kept = tl.load(lowest_kept_ptr + row)
        # Of most tiles nothing is kept: no noise is made for these.
        hidden = tl.where(inside, logits < lowest_kept, True)
        noisy = noisy & (tl.min(hidden.to(tl.int32), axis=0) == 0)
        scores = tl.where((temperature > 0.0) & hidden, float("-inf"), scores)
    if noisy:
        token_ids = offsets.to(tl.int64)
        if MAPPED:
            token_ids = tl.load(token_ids_ptr + offsets, mask=inside, other=0)
        key = key_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        scores = tl.div_rn(logits, temperature) + gumbel(key, token_ids)
        if FILTERED:
            scores = tl.where(hidden, float("-inf"), scores)
    value, index = argmax_in_tile(scores, offsets, vocab)
    place = row.to(tl.int64) * num_tiles + tile
    tl.store(value_ptr + place, value)
    tl.store(index_ptr + place, index)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    lowest_kept: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    tile: int = TILE,
) -> torch.Tensor:
    """As `sample_reference`, up to the rounding of logarithms. Rows of `logits` must be contiguous, and so must all
    others but `positions`."""
    value, index = tile_buffers(len(logits), logits.shape[1], tile, logits.device)
    if len(logits) > 0:
        _sample_kernel[value.shape](
            logits, temperature, seeds, positions.contiguous(), lowest_kept, token_ids,
            value, index, logits.shape[1], logits.stride(0), value.shape[1],
            FILTERED=lowest_kept is not None, MAPPED=token_ids is not None, BLOCK=tile, num_warps=WARPS,
        )  # fmt: skip
    return reduce_tiles(value, index)


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
    must all others but `positions`."""
    num_rows, vocab = logits.shape
    scores = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    if num_rows > 0:
        _noisy_scores_kernel[(num_rows, triton.cdiv(vocab, TILE))](
            logits,
            temperature,
            seeds,
            positions.contiguous(),
            scores,
            vocab,
            logits.stride(0),
            BLOCK=TILE,
            num_warps=WARPS,
        )
    return scores
