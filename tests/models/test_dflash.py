"""The paged drafter computes what a second, dense implementation of the equations computes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dflash_backend.checkpoints.resolve import read_draft
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models import DFlashModel
from tests.paged import block_tables, caches, context
from tests.tiny_models import make_draft

CPU = torch.device("cpu")


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`[n, heads, dim]`: complex rotation of the pair (i, i + dim/2) by position * theta^(-2i/dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    z = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat([z.real, z.imag], dim=-1).float()


def dense_draft(
    w: dict[str, torch.Tensor], d: DecoderSpec, features: torch.Tensor, block: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Outputs `[1 + k, hidden]` of one draft block over all context features `[n, L * hidden]`, no cache."""
    n, q = len(features), len(block)
    positions = torch.arange(n + q)
    ctx = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = block
    for i in range(d.num_layers):
        p = f"layers.{i}."
        a = rms(x, w[p + "input_layernorm.weight"])
        both = torch.cat([ctx, a])
        query = rms((a @ w[p + "self_attn.q_proj.weight"].T).view(q, d.num_heads, -1), w[p + "self_attn.q_norm.weight"])
        key = (both @ w[p + "self_attn.k_proj.weight"].T).view(n + q, d.num_kv_heads, -1)
        key = rotate(rms(key, w[p + "self_attn.k_norm.weight"]), positions)
        value = (both @ w[p + "self_attn.v_proj.weight"].T).view(n + q, d.num_kv_heads, -1)
        groups = d.num_heads // d.num_kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", rotate(query, positions[n:]), key) / math.sqrt(d.head_dim)
        if causal:
            scores = scores.masked_fill(positions[None, None, :] > positions[n:][None, :, None], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(q, -1)
        x = x + out @ w[p + "self_attn.o_proj.weight"].T
        m = rms(x, w[p + "post_attention_layernorm.weight"])
        gated = F.silu(m @ w[p + "mlp.gate_proj.weight"].T) * (m @ w[p + "mlp.up_proj.weight"].T)
        x = x + gated @ w[p + "mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"])


@pytest.mark.parametrize("causal", [False, True])
@torch.inference_mode()
def test_draft_blocks_equal_a_dense_implementation_after_any_acceptance(tmp_path: Path, causal: bool) -> None:
    weights = make_draft(tmp_path, is_causal=causal)
    spec = read_draft(tmp_path)
    model = DFlashModel.load(spec, 512, torch.float32, CPU)
    kv, tables = caches(spec.decoder), block_tables(1)
    rng = np.random.default_rng(5)
    features = torch.randn(60, weights["fc.weight"].shape[1], generator=torch.Generator().manual_seed(2))
    done = 0
    # Each step makes some more positions final, overwriting what the last block left there, then drafts.
    while done < 50:
        accepted = int(rng.integers(1, 9))
        index = torch.arange(done, done + accepted)
        inject = context(tables, [done], [accepted])
        for layer_kv, cache in zip(model.context_kv(features[index], index), kv, strict=True):
            inject.backend.write_kv(layer_kv, inject.slots, cache)
        done += accepted
        block = torch.randn(8, spec.decoder.hidden_size, generator=torch.Generator().manual_seed(done))
        output = model.forward(block, context(tables, [done], [8], model.patterns), kv)
        expected = dense_draft(weights, spec.decoder, features[:done], block, causal)
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
