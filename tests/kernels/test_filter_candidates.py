"""Filters search among the logits near the largest: whatever they keep is there, and of a model's it is little."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.filter_candidates import Candidates, candidates
from dflash_kernels.logits_filter import TILE as SERVING_TILE
from dflash_kernels.logits_filter import WARPS, lowest_kept_reference
from tests.kernels.inputs import DEVICE
from tests.kernels.test_sampling import TILE, assert_same_filter, filters


def found(logits: torch.Tensor, parameters: list[torch.Tensor], tile: int = TILE) -> Candidates:
    on_device = [each.to(DEVICE) for each in (logits, *parameters)]
    return candidates(*on_device, tile, WARPS)


def model_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Bell-shaped, with a few tokens far above, as in `benchmarks.gpu.sampling`."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(num_rows, vocab, generator=generator)
    where = torch.randint(vocab, (num_rows, 50), generator=generator)
    return logits.scatter_add(1, where, 12.0 * torch.rand(num_rows, 50, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{"top_k": 20}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.95, "min_p": 0.01}, {"top_p": 0.3}],
)
def test_what_the_filters_keep_is_among_few_candidates(dtype: torch.dtype, changes: dict[str, float]) -> None:
    """At the sizes that serve: 40,000 tokens are three slices."""
    logits, parameters = model_logits(3, 40_000).to(dtype), filters(3, temperature=0.6, **changes)
    near = found(logits, parameters, SERVING_TILE)
    assert near.kept.shape == (3, 3, 1024)
    assert (near.num_kept <= 1024).all(), "the row is not searched"
    lowest = lowest_kept_reference(logits, *parameters)
    assert lowest is not None
    for row in range(3):
        kept = near.kept[row].flatten().cpu()
        kept = kept[kept > float("-inf")]
        assert len(kept) == int(near.num_kept[row].sum())
        expected = logits[row][logits[row].float() >= lowest[row]]
        assert torch.equal(kept[kept.float() >= lowest[row]].sort().values, expected.sort().values)


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("where", ["first", "spread", "last"])
def test_likely_tokens_anywhere(changes: dict[str, float], where: str) -> None:
    """All in the first slice, or the last, or spread over them; some more than a slice keeps."""
    logits = torch.zeros(2, 5 * TILE + 7) - 30.0
    places = {"first": range(3, 15), "spread": range(5, 320, 29), "last": range(5 * TILE - 6, 5 * TILE + 7)}[where]
    for number, place in enumerate(places):
        logits[:, place] = torch.tensor([0.1 * number, 3.0 - 0.7 * number])
    assert_same_filter(logits, filters(2, **changes))


def test_top_p_is_of_the_weight_that_min_p_keeps() -> None:
    """Of the weights 1, 0.6, 0.5 and 0.4 three are three quarters, whatever else min-p hides."""
    logits = torch.full((1, 4 * TILE), -30.0)
    for place, weight in zip(range(3, 4 * TILE, 10), [1.0, 0.6, 0.5, 0.4] + [0.1] * 20, strict=False):
        logits[0, place] = torch.tensor(weight).log()
    parameters = filters(1, temperature=1.0, top_p=0.75, min_p=0.3)
    near = found(logits, parameters)
    assert int(near.num_kept.max()) <= near.kept.shape[2]
    assert assert_same_filter(logits, parameters).nonzero()[:, 1].tolist() == [3, 13, 23]


def test_a_flat_row_is_searched_as_a_whole() -> None:
    logits = torch.linspace(0.0, 1e-3, 6 * TILE)[torch.randperm(6 * TILE, generator=torch.Generator().manual_seed(1))]
    parameters = filters(1, top_p=0.7)
    near = found(logits[None], parameters)
    assert int(near.num_kept.max()) > near.kept.shape[2]
    assert_same_filter(logits[None], parameters)


def test_a_row_whose_tail_is_looked_for_is_searched_as_a_whole() -> None:
    """Its weights lie further below the largest than steps reach."""
    logits = torch.cat([torch.tensor([300.0]), torch.linspace(-5.0, 5.0, 4 * TILE)])[None]
    parameters = filters(1, temperature=1.0, top_k=40)
    near = found(logits, parameters)
    assert int(near.num_kept.min()) > near.kept.shape[2]
    assert_same_filter(logits, parameters)


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_those_beside_them(seed: int) -> None:
    logits = model_logits(6, 700, seed)
    parameters = [
        torch.full((6,), 0.9),
        torch.tensor([0, 5, 5, 0, 900, 2]),
        torch.tensor([0.9, 1.0, 0.7, 0.99, 1, 0.5]),
    ]
    parameters.append(torch.tensor([0.0, 0.0, 0.05, 0.2, 0.0, 0.0]))
    together = assert_same_filter(logits, parameters)
    for row in range(6):
        alone = assert_same_filter(logits[row : row + 1], [each[row : row + 1] for each in parameters])
        assert torch.equal(alone[0], together[row])
