"""Choose one of a few candidates for each draft of a block, from the first to the last: a candidate's score is its own
and that of the edge from the candidate chosen before it.

The edge from token p to candidate c of a draft is `sum over r of predecessors[p, r] * hidden[r] * successors[c, r]`,
`hidden` being the draft's; the first edge of a block is from its anchor.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

# Ranks that a program multiplies at a time.
RANK_TILE = 64


def selector_walk_reference(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    hidden: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
    anchors: torch.Tensor,
    starts: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidate is chosen for each draft, int64 `[n]`, the first among equals; and the edges to all of its
    candidates from the one chosen before, float32 `[n, candidates]`.

    scores: float32 `[n, candidates]`; candidates: int64 of the same shape, token ids. hidden: `[n, rank]`.
    predecessors, successors: `[vocab, rank]`. anchors: int64 `[R]`. starts: int64 `[R + 1]`; row r has the drafts from
    `starts[r]` to before `starts[r + 1]`. temperature: float32 `[n]`, what an edge is divided by where it is not 0,
    for scores that have been; None: nothing is divided.
    """
    lens, previous = starts.diff(), anchors.clone()
    chosen, edges = torch.empty(len(scores), dtype=torch.int64), torch.empty_like(scores)
    for step in range(int(lens.max()) if len(lens) else 0):
        rows = (lens > step).nonzero()[:, 0]
        drafts = starts[rows] + step
        context = predecessors[previous[rows]].float() * hidden[drafts].float()
        edge = (successors[candidates[drafts]].float() @ context[:, :, None])[:, :, 0]
        edges[drafts] = edge
        if temperature is not None:
            divisor = temperature[drafts]
            edge = edge / torch.where(divisor == 0, 1.0, divisor)[:, None]
        chosen[drafts] = (scores[drafts] + edge).argmax(dim=1)
        previous[rows] = candidates[drafts, chosen[drafts]]
    return chosen, edges


@cached_launches
@triton.jit
def _selector_walk_kernel(
    scores_ptr, candidates_ptr, hidden_ptr, predecessors_ptr, successors_ptr, anchors_ptr, starts_ptr,
    temperature_ptr, chosen_ptr, edges_ptr,
    NUM: tl.constexpr, RANK: tl.constexpr, DIVIDED: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program walks along one row."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < NUM
    first = tl.load(starts_ptr + row).to(tl.int32)
    last = tl.load(starts_ptr + row + 1).to(tl.int32)
    previous = tl.load(anchors_ptr + row)
    for draft in range(first, last):
        place = draft * NUM + column
        candidate = tl.load(candidates_ptr + place, mask=inside, other=0)
        edge = tl.zeros([COLUMNS], dtype=tl.float32)
        for base in tl.static_range(0, RANK, TILE):
            rank = base + tl.arange(0, TILE)
            within = rank < RANK
            context = tl.load(predecessors_ptr + previous * RANK + rank, mask=within, other=0.0).to(tl.float32)
            own = tl.load(hidden_ptr + draft * RANK + rank, mask=within, other=0.0)
            context *= own.to(tl.float32)
            both = inside[:, None] & within[None, :]
            successor = tl.load(successors_ptr + candidate[:, None] * RANK + rank[None, :], mask=both, other=0.0)
            edge += tl.sum(successor.to(tl.float32) * context[None, :], axis=1)
        tl.store(edges_ptr + place, edge, mask=inside)
        if DIVIDED:
            temperature = tl.load(temperature_ptr + draft)
            edge = tl.div_rn(edge, tl.where(temperature == 0.0, 1.0, temperature))
        total = tl.load(scores_ptr + place, mask=inside, other=0.0) + edge
        # What is not a number, of padding, must not lead past the candidates.
        total = tl.where(total == total, total, -3.0e38)
        index = tl.argmax(tl.where(inside, total, float("-inf")), axis=0)
        tl.store(chosen_ptr + draft, index.to(tl.int64))
        previous = tl.load(candidates_ptr + draft * NUM + index)


def selector_walk(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    hidden: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
    anchors: torch.Tensor,
    starts: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `selector_walk_reference`, for contiguous tensors."""
    (num_drafts, num_candidates), rank = scores.shape, hidden.shape[1]
    chosen = torch.empty(num_drafts, dtype=torch.int64, device=scores.device)
    edges = torch.empty_like(scores)
    if num_drafts > 0:
        _selector_walk_kernel[(len(anchors),)](
            scores, candidates, hidden, predecessors, successors, anchors, starts, temperature, chosen, edges,
            NUM=num_candidates, RANK=rank, DIVIDED=temperature is not None,
            COLUMNS=triton.next_power_of_2(num_candidates), TILE=min(RANK_TILE, triton.next_power_of_2(rank)),
        )  # fmt: skip
    return chosen, edges
