"""What FlashAttention's packages take: the queries of some rows behind one another, and windows by their two sides."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from dflash_backend.attention.interface import AttentionPattern, DeviceLengths

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


def window_sides(pattern: AttentionPattern) -> tuple[int, int]:
    """How many positions to the left and to the right of its own a query sees; -1 for all."""
    left = -1 if pattern.sliding_window is None else pattern.sliding_window - 1
    return left, 0 if pattern.causal else left


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of a small array on `device` that the host does not wait for; torch keeps pinned memory until it has
    run."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def running_sum(lens: torch.Tensor) -> torch.Tensor:
    """int32 `[n]` -> int32 `[n + 1]`, from 0 on."""
    return F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def compact_tokens(rows: DeviceLengths, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`source` and `target` of `FlashAttnMetadata`, computed on the device, for as many queries as the bounds allow."""
    ends = rows.query_lens.cumsum(0)
    place = torch.arange(num_queries, device=ends.device)
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
    token = rows.query_start[row] + place - (ends - rows.query_lens)[row]
    there = place < ends[-1]
    return token * there, (token + 1) * there
