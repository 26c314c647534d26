"""What stands in for cuDNN's attention, and pieces of few queries and positions."""

from __future__ import annotations

import pytest
import torch

from dflash_backend.attention import cudnn_rows
from dflash_kernels.shared_prefix import merge_parts_reference


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch documents `_scaled_dot_product_cudnn_attention`: a causal mask begins at the first query and key, the
    result lies in memory as the queries do, and what is masked is multiplied by 0, so that it must be finite."""
    num_queries, num_keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    assert not causal or num_queries == num_keys
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.float() @ key.float().transpose(2, 3) * query.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(num_queries, num_keys).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(3) @ value.float()).to(query.dtype)
    return attended.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(3, keepdim=True)


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of pieces for rows of tens of queries, merged by the kernel's reference."""
    monkeypatch.setattr(cudnn_rows, "merge_parts", merge_parts_reference)
    for name, value in (("SQUARE", 4), ("PIECE", 8), ("LAUNCH_PAIRS", 0), ("MERGE_POSITIONS", 1)):
        monkeypatch.setattr(cudnn_rows, name, value)
    # What was found for other sizes is not looked up.
    monkeypatch.setattr(cudnn_rows, "row_pieces", cudnn_rows.row_pieces.__wrapped__)
