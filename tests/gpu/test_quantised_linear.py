"""Products by quantised weights on a GPU: captured as a graph, and right for what lies in their input when it is
replayed."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.quantised_linear import invariant_quantised_linear, quantised_linear, quantised_linear_reference
from tests.kernels.test_quantised_linear import assert_close, fp8, int4, random

WEIGHTS = {
    "fp8 in blocks": (fp8, (1024, 4096, 128, 128)),
    "fp8 of rows": (fp8, (1024, 4096, 1, 4096)),
    "int4": (int4, (1024, 4096, 128)),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("num_tokens", [1, 16, 50, 128, 129, 700])
def test_a_captured_product_is_right_for_other_input(name: str, num_tokens: int) -> None:
    make, sizes = WEIGHTS[name]
    weight = make(*sizes)
    x = random(num_tokens, 4096).bfloat16()
    for product in (quantised_linear, invariant_quantised_linear):
        product(x, weight)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(x, weight)
        for seed in (1, 2):
            x.copy_(random(num_tokens, 4096, seed=seed).bfloat16())
            graph.replay()
            assert_close(out, quantised_linear_reference(x, weight))


def test_rows_have_the_same_bits_alone_and_among_others_where_that_is_asked_for() -> None:
    weight, x = fp8(1024, 4096, 128, 128), random(300, 4096).bfloat16()
    whole = invariant_quantised_linear(x, weight)
    for count in (1, 17, 64, 65):
        assert torch.equal(invariant_quantised_linear(x[5 : 5 + count], weight), whole[5 : 5 + count])
