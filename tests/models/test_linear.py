"""A `Linear` of several projections computes what each of them computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.models.linear import Linear
from tests.models.sources import TensorSource

SIZES = {"q": 6, "k": 2}


@pytest.mark.parametrize("bias", [False, True])
def test_projections_are_fused_in_their_order_and_taken_apart_again(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"attn.{name}.weight": torch.randn(size, 5, generator=generator) for name, size in SIZES.items()}
    if bias:
        tensors |= {f"attn.{name}.bias": torch.randn(size, generator=generator) for name, size in SIZES.items()}
    source = TensorSource(tensors)
    linear, x = Linear.read(source, "attn.", SIZES, 5, bias), torch.randn(3, 5, generator=generator)
    parts = [F.linear(x, tensors[f"attn.{name}.weight"], tensors.get(f"attn.{name}.bias")) for name in SIZES]
    assert not source.unread
    assert (linear.in_features, linear.out_features) == (5, 8)
    torch.testing.assert_close(linear(x), torch.cat(parts, dim=1))
    key = linear.rows(slice(6, None))
    torch.testing.assert_close(key(x), parts[1])
    torch.testing.assert_close(linear.rows(torch.tensor([7, 0]))(x), linear(x)[:, [7, 0]])
    torch.testing.assert_close(Linear.stacked([key, linear])(x), torch.cat([parts[1], *parts], dim=1))
