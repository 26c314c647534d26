"""The short convolution and the heads that come of it, by the kernel and by its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dflash_kernels.conv_heads import L2_EPS, DeltaHeads, conv_heads, conv_heads_reference
from tests.kernels.inputs import HALF_DTYPES, random

Form = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
FORMS = [conv_heads] if torch.cuda.is_available() else [conv_heads_reference, conv_heads]
SHAPES = [DeltaHeads(1, 1, 8, 8), DeltaHeads(2, 6, 8, 12), DeltaHeads(2, 4, 20, 5), DeltaHeads(3, 3, 16, 32)]


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def num_channels(heads: DeltaHeads) -> int:
    return 2 * heads.num_key_heads * heads.key_dim + heads.num_value_heads * heads.value_dim


def by_library(inputs: torch.Tensor, conv: torch.Tensor, heads: DeltaHeads) -> list[torch.Tensor]:
    """With torch's own convolution, head by head in float64."""
    exact = inputs.double().transpose(1, 2)
    activated = F.silu(F.conv1d(exact, conv.double()[:, None], groups=conv.shape[0])).transpose(1, 2)
    key_size = heads.num_key_heads * heads.key_dim
    queries, keys, values = activated.split([key_size, key_size, heads.num_value_heads * heads.value_dim], dim=-1)
    found: list[list[torch.Tensor]] = [[], [], []]
    for head in range(heads.num_value_heads):
        at = head // (heads.num_value_heads // heads.num_key_heads) * heads.key_dim
        for part, x in zip(found, (queries, keys), strict=False):
            own = x[..., at : at + heads.key_dim]
            part.append(own / (own.square().sum(-1, keepdim=True) + L2_EPS).sqrt())
        found[2].append(values[..., head * heads.value_dim : (head + 1) * heads.value_dim])
    found[0] = [query * heads.key_dim**-0.5 for query in found[0]]
    return [torch.stack(part, dim=1) for part in found]


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 5), (2, 16), (1, 37)])
def test_heads_are_those_of_a_convolution(form: Form, heads: DeltaHeads, taps: int, num_rows: int, width: int) -> None:
    inputs, conv = random(num_rows, taps - 1 + width, num_channels(heads)), random(num_channels(heads), taps, seed=1)
    for found, wanted in zip(form(inputs, conv, heads), by_library(inputs, conv, heads), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_rounds_where_the_reference_does(dtype: torch.dtype) -> None:
    heads = DeltaHeads(2, 4, 16, 16)
    inputs = random(2, 23, num_channels(heads)).to(dtype)
    conv = random(num_channels(heads), 4, seed=1).to(dtype)
    for found, wanted in zip(conv_heads(inputs, conv, heads), conv_heads_reference(inputs, conv, heads), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def test_no_rows_are_possible(form: Form) -> None:
    heads = DeltaHeads(1, 2, 8, 8)
    queries, _, values = form(random(0, 8, 32), random(32, 4), heads)
    assert (queries.shape, values.shape) == ((0, 2, 5, 8), (0, 2, 5, 8))
