"""What the operations of a step give one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_backend.attention import AttentionBatch
from dflash_backend.models.interface import WindowSlots


@dataclass(frozen=True)
class Prepared:
    """What the target runs. token_ids, positions, slots: int64 `[T]`. starts, seq_lens: int32 `[R]`, 0 for padding.
    layout: the rows as attention runs them. padded: whether slots may be -1. windows: where the KV of layers with a
    window lies, if these have block ids of their own.

    A padding token, and one that lies past its row's blocks (the request has ended meanwhile), has slot -1, id 0 and
    position 0. `seq_lens` never goes past a row's blocks either.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    layout: AttentionBatch
    padded: bool
    windows: WindowSlots | None = None


@dataclass(frozen=True)
class Accepted:
    """What the accept phase decided. count: int32 `[R]`, accepted drafts. tokens: int64 `[R, k + 1]`, those drafts and
    the token that follows, then 0; all 0 for a row that does not sample."""

    count: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class FinalTokens:
    """The tokens whose context KV is written: positions and slots int64 `[n]`; index: int64 `[n]` or a slice, their
    places among the step's tokens, None for all of them. padded: whether slots may be -1, where nothing is kept."""

    positions: torch.Tensor
    slots: torch.Tensor
    index: torch.Tensor | slice | None = None
    padded: bool = False
