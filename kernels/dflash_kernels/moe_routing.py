"""Which experts each token goes to, and the tokens of each expert together.

An entry is one token at one of its experts: entry `token * per_token + rank` is the token at its rank-th most likely
expert. `group` lists the entries expert by expert, in blocks of one expert each, as the products of
`dflash_kernels.moe` take them. How many blocks there are depends on what the router said, so the arrays are as long as
the worst case, which follows from shapes alone: nothing is read back to the host, and a captured graph holds for every
routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton


@dataclass(frozen=True)
class ExpertBlocks:
    """Entries in blocks of one size, each block's of one expert.

    entries: int32 `[num_blocks * block_size]`, ascending for each expert; the number of all entries where a block has
    no more of its expert. experts: int32 `[num_blocks]`, -1 for blocks past the last; what `entries` holds there means
    nothing.
    """

    entries: torch.Tensor
    experts: torch.Tensor


def route_reference(logits: torch.Tensor, per_token: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `per_token` most likely experts of each token, the most likely first.

    logits: `[n, num_experts]`. Returns their weights `[n, per_token]` in the logits' dtype, computed in float32 and
    scaled to a sum of 1 where `normalise`, and their ids, int64 `[n, per_token]`.
    """
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = probabilities.topk(per_token, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def max_blocks(num_entries: int, num_experts: int, block_size: int) -> int:
    """The most blocks that `num_entries` entries can need, whatever the router says: each expert that has any leaves at
    most `block_size - 1` slots of its last block empty."""
    hit = min(num_experts, num_entries)
    return (num_entries + hit * (block_size - 1)) // block_size


@cached_launches
@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    NUM_EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    RANKS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One program routes one token. Of experts that are equally likely the first is taken."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    is_expert = lanes < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + lanes, mask=is_expert, other=float("-inf")).to(tl.float32)
    exps = tl.exp(logits - tl.max(logits, axis=0))
    left = tl.where(is_expert, exps / tl.sum(exps, axis=0), -1.0)
    ranks = tl.arange(0, RANKS)
    weights = tl.zeros([RANKS], dtype=tl.float32)
    experts = tl.zeros([RANKS], dtype=tl.int32)
    for rank in range(PER_TOKEN):
        highest = tl.max(left, axis=0)
        # A padding token may hold anything, also NaN, which equals nothing: its experts must exist all the same.
        expert = tl.minimum(tl.min(tl.where(left == highest, lanes, LANES), axis=0), NUM_EXPERTS - 1)
        weights = tl.where(ranks == rank, highest, weights)
        experts = tl.where(ranks == rank, expert, experts)
        left = tl.where(lanes == expert, -1.0, left)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    is_rank = ranks < PER_TOKEN
    tl.store(weights_ptr + token * PER_TOKEN + ranks, weights, mask=is_rank)
    tl.store(experts_ptr + token * PER_TOKEN + ranks, experts, mask=is_rank)


def route(logits: torch.Tensor, per_token: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route_reference`, in one launch; the ids are int32. Of NaN logits some experts come out."""
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, per_token, dtype=logits.dtype, device=logits.device)
    experts = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            LANES=triton.next_power_of_2(num_experts),
            PER_TOKEN=per_token,
            RANKS=triton.next_power_of_2(per_token),
            NORMALISE=normalise,
            num_warps=1,
        )
    return weights, experts


# One compiled kernel serves all numbers of entries: a step must not wait for a compiler.
@cached_launches
@triton.jit(do_not_specialize=["num_entries", "num_blocks"])
def _group_kernel(
    expert_of_ptr,
    entries_ptr,
    block_experts_ptr,
    num_entries,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes the blocks of one expert. It counts all entries first, so that it knows where its blocks
    begin without asking the other programs."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_entries, CHUNK):
        # What lies past the end is counted in the bin behind the experts'.
        ids = tl.load(expert_of_ptr + start + lanes, mask=start + lanes < num_entries, other=NUM_EXPERTS)
        counts += tl.histogram(ids, BINS)
    blocks = tl.where(bins < NUM_EXPERTS, (counts + BLOCK - 1) // BLOCK, 0)
    own_count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)

    place = entries_ptr + first_block * BLOCK
    for start in range(0, num_entries, CHUNK):
        ids = tl.load(expert_of_ptr + start + lanes, mask=start + lanes < num_entries, other=NUM_EXPERTS)
        own = (ids == expert).to(tl.int32)
        tl.store(place + tl.cumsum(own, axis=0) - 1, start + lanes, mask=own != 0)
        place += tl.sum(own, axis=0)
    rest = tl.arange(0, BLOCK)
    tl.store(place + rest, num_entries, mask=own_count + rest < own_blocks * BLOCK)

    for start in range(0, own_blocks, CHUNK):
        number = start + lanes
        tl.store(block_experts_ptr + first_block + number, expert, mask=number < own_blocks)
    if expert == NUM_EXPERTS - 1:
        for start in range(first_block + own_blocks, num_blocks, CHUNK):
            tl.store(block_experts_ptr + start + lanes, -1, mask=start + lanes < num_blocks)


# Entries that a program of `group` reads at a time: FEW_CHUNK of at most FEW_ENTRIES, else MANY_CHUNK.
FEW_ENTRIES, FEW_CHUNK, MANY_CHUNK = 4096, 1024, 4096


def group(experts: torch.Tensor, num_experts: int, block_size: int) -> ExpertBlocks:
    """Put the entries of `experts` (int32 `[n, per_token]`, n not 0, ids below `num_experts`) into blocks.

    The blocks are a function of the ids alone: no order among programs shows in them.
    """
    num_entries = experts.numel()
    num_blocks = max_blocks(num_entries, num_experts, block_size)
    entries = torch.empty(num_blocks * block_size, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=experts.device)
    few = num_entries <= FEW_ENTRIES
    _group_kernel[(num_experts,)](
        experts,
        entries,
        block_experts,
        num_entries,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        CHUNK=FEW_CHUNK if few else MANY_CHUNK,
        BLOCK=block_size,
        num_warps=4 if few else 8,
    )
    return ExpertBlocks(entries, block_experts)
