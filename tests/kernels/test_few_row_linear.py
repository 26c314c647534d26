"""Products of few rows whose inputs are split among programs: right by every tile, whichever program ends last."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels import few_row_linear
from dflash_kernels.few_row_linear import FewRowProducts, FewRowTile, few_row_linear_reference
from tests.kernels.inputs import DEVICE, HALF_DTYPES, random

TILES = [
    FewRowTile(64, 64, 3),
    FewRowTile(128, 64, 3),
    FewRowTile(64, 32, 3, by_last=False),
    FewRowTile(64, 64, 3, by_descriptor=True),
]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=FewRowTile.describe)
def test_a_product_is_as_torchs_and_the_next_one_too(tile: FewRowTile, dtype: torch.dtype) -> None:
    products = FewRowProducts(tile, 200, torch.device(DEVICE))
    # Whole tiles and a cut one; one part, some, the last of which has fewer pieces, and more than there are pieces.
    sizes = (1, 128, 192, 3), (17, 200, 320, 2), (16, 72, 256, 1), (16, 72, 320, 5), (32, 128, 192, 9)
    for rows, outputs, inputs, splits in sizes:
        x, weight = random(rows, inputs, seed=rows).to(dtype), random(outputs, inputs).to(dtype)
        expected = few_row_linear_reference(x.double(), weight.double())
        for _ in range(2):
            found = products(x, weight, splits)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.01)
    assert not products._counters.any()


def test_what_a_tile_cannot_multiply_is_refused() -> None:
    products = FewRowProducts(TILES[0], 64, torch.device(DEVICE))
    x, weight = random(1, 96).half(), random(64, 96).half()
    with pytest.raises(ValueError, match="1 rows of 96 in 1 parts are not of 64 x 64, 3 stages, 4 warps"):
        products(x, weight, 1)
    with pytest.raises(ValueError, match="33 rows of 64"):
        products(random(33, 64).half(), random(64, 64).half(), 1)
    with pytest.raises(ValueError, match="in 33 parts"):
        products(random(1, 64).half(), random(64, 64).half(), few_row_linear.MAX_SPLITS + 1)
