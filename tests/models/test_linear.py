"""A `Linear` of several projections computes what each of them computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_backend.models.linear import Linear
from dflash_backend.models.ops import InvariantLayerOps
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 32), (1536, 160), (2048, 1024)])
def test_a_batch_invariant_row_has_the_same_bits_by_the_library_that_serves(
    outputs: int, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    plain = Linear(torch.randn(outputs, inputs, generator=generator).to(dtype))
    linear, x = (
        plain.with_product(InvariantLayerOps().product_of),
        torch.randn(150, inputs, generator=generator).to(dtype),
    )
    torch.set_num_threads(threads)
    whole = linear(x)
    parts = {count: torch.cat([linear(part) for part in x.split(count)]) for count in (1, 3, 17, 64)}
    torch.set_num_threads(before)
    torch.testing.assert_close(whole, plain(x))
    assert [count for count, part in parts.items() if not torch.equal(part, whole)] == []
