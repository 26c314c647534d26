"""Attention in torch whose softmax has a sink beside its keys: a learned logit of each head that has no value (Xiao et
al., arXiv 2309.17453; as gpt-oss has it)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """query: `[num_rows, num_heads, query_len, head_dim]`; key, value: `[num_rows, num_kv_heads, num_keys, head_dim]`;
    mask: additive, `[num_rows, 1, query_len, num_keys + 1]`, the sink's column last; sinks: `[num_heads]`. Returns
    `[num_rows, num_heads, query_len, head_dim]`.

    The sink is a key of its own with a value of zeros. Heads have one more number, by which the product with this key
    is the head's sink and with every other key is what it was: so the mask stays one for all heads, and no scores are
    kept.
    """
    head_dim = query.shape[-1]
    logits = (sinks * head_dim**0.5).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    key, value = (F.pad(part, (0, 1, 0, 1)) for part in (key, value))
    key[..., -1, -1] = 1.0
    attended = F.scaled_dot_product_attention(
        torch.cat([query, logits], dim=-1),
        key,
        value,
        attn_mask=mask,
        scale=head_dim**-0.5,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[..., :head_dim]
