"""What a CPU does around the models in a step with one row, as one stream has: by slices, with plain numbers.

The references of `prepare_step`, `prepare_draft` and `accept` call these for a single row that is no padding. For many
rows they gather with arrays; for one row that takes ten times as long as the slices below. State is as in
`prepare_step`, and so is what a result holds.
"""

from __future__ import annotations

import numpy as np
import torch

Slices = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Ids, positions and slots, int64 `[n]`."""


def number(tensor: torch.Tensor) -> int:
    """The one number of a tensor `[1]`."""
    value: int = tensor.numpy().item()
    return value


def covered_len(tokens: torch.Tensor, num_blocks: torch.Tensor, block_size: int, index: int) -> int:
    """Positions that the blocks of request `index` hold."""
    return min(num_blocks.numpy().item(index) * block_size, tokens.shape[1])


def look_up(
    tokens: torch.Tensor, blocks: torch.Tensor, block_size: int, index: int, start: int, num_tokens: int
) -> Slices:
    """The positions `[start, start + num_tokens)` of request `index`, which its blocks hold."""
    positions = np.arange(start, start + num_tokens)
    block = positions // block_size
    slots = (blocks.numpy()[index].take(block).astype(np.int64) - block) * block_size + positions
    return tokens.numpy()[index, start : start + num_tokens].copy(), positions, slots


def prepare(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    block_size: int,
    index: int,
    start: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """As `prepare_step.prepare_reference`, of `num_tokens` tokens of request `index` from position `start` on; None
    where its blocks do not hold them all."""
    end = start + num_tokens
    if end > covered_len(tokens, num_blocks, block_size, index):
        return None
    put = torch.from_numpy
    ids, positions, slots = look_up(tokens, blocks, block_size, index, start, num_tokens)
    starts, ends = np.array([start], dtype=np.int32), np.array([end], dtype=np.int32)
    return put(ids), put(positions), put(slots), put(starts), put(ends)


def prepare_draft(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    block_size: int,
    index: int,
    anchor: int,
    num_queries: int,
    placeholder_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Ids, positions and slots of the `num_queries` queries of request `index`, whose anchor lies at this position;
    None where its blocks do not hold them all."""
    if anchor + num_queries > covered_len(tokens, num_blocks, block_size, index):
        return None
    ids, positions, slots = look_up(tokens, blocks, block_size, index, anchor, num_queries)
    ids[1:] = placeholder_id
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(slots)


def accept(
    target_tokens: torch.Tensor,
    tokens: torch.Tensor,
    computed: torch.Tensor,
    k: int,
    index: int,
    first: int,
    num_draft: int,
    logits_start: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `accept.accept_reference`, for request `index`, whose first draft lies at `first`; None where `tokens` is too
    narrow for the drafts and the token behind them."""
    new_tokens = np.zeros((1, k + 1), dtype=np.int64)
    if logits_start < 0:
        computed.numpy()[index] = first
        return torch.zeros(1, dtype=torch.int32), torch.from_numpy(new_tokens)
    if first + num_draft >= tokens.shape[1]:
        return None
    own = target_tokens.numpy()[logits_start : logits_start + num_draft + 1]
    row = tokens.numpy()[index]
    count = 0
    for draft, token in zip(row[first : first + num_draft].tolist(), own.tolist(), strict=False):
        if draft != token:
            break
        count += 1
    new_tokens[0, : count + 1] = own[: count + 1]
    row[first + count] = own[count]
    computed.numpy()[index] = first + count
    return torch.from_numpy(np.array([count], dtype=np.int32)), torch.from_numpy(new_tokens)
