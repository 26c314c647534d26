"""Filters search the groups of logits near the largest: whatever they keep is there, and of a model's it is little."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.logits_filter import GROUP as SERVING_GROUP
from dflash_kernels.logits_filter import MOST_GROUPS, least_group, lowest_kept, lowest_kept_reference, search
from dflash_kernels.logits_filter import MOST_KEPT as SERVING_MOST
from dflash_kernels.logits_filter import TILE as SERVING_TILE
from tests.kernels.inputs import DEVICE
from tests.kernels.test_sampling import GROUP, MOST_KEPT, TILE, assert_same_filter, filters

# In a row that is searched as a whole, and where no group was written.
UNTOUCHED = 77.0


def searched(
    logits: torch.Tensor, parameters: list[torch.Tensor], tile: int = TILE, group: int = GROUP, most: int = MOST_KEPT
) -> list[list[float] | None]:
    """The logits that each row's search reads; None for a row that is searched as a whole."""
    on_device = [each.to(DEVICE) for each in (logits, *parameters)]
    kept = torch.full((len(logits), most, group), UNTOUCHED, dtype=logits.dtype, device=DEVICE)
    search(on_device[0], tuple(on_device[1:]), kept, tile)
    rows = kept.flatten(1).cpu().float()
    return [None if bool((row == UNTOUCHED).all()) else row[row != UNTOUCHED].tolist() for row in rows]


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
def test_what_the_filters_keep_is_in_few_groups(dtype: torch.dtype, changes: dict[str, float]) -> None:
    """At the sizes that serve: 40,000 tokens are 625 groups. Each logit that is kept is read, and less than a sixth of
    all."""
    logits, parameters = model_logits(3, 40_000).to(dtype), filters(3, temperature=0.6, **changes)
    rows = searched(logits, parameters, SERVING_TILE, SERVING_GROUP, SERVING_MOST)
    lowest = lowest_kept_reference(logits, *parameters)
    assert lowest is not None
    for row in range(3):
        read = rows[row]
        assert read is not None, "the row is not searched"
        assert len(read) < 40_000 / 6
        expected = logits[row][logits[row].float() >= lowest[row]].float().sort().values.tolist()
        assert sorted(each for each in read if each >= lowest[row]) == expected


def test_a_group_has_no_more_logits_than_it_must() -> None:
    """Top-k's groups are those whose largest logits are the k largest: of these only what may be kept is read."""
    logits = torch.arange(20 * GROUP, dtype=torch.float32)[None]
    (read,) = searched(logits, filters(1, top_k=3))
    assert read is not None
    assert sorted(each for each in read if each > float("-inf")) == list(range(18 * GROUP - 1, 20 * GROUP))
    assert len(read) == 3 * GROUP


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("where", ["first", "spread", "last"])
def test_likely_tokens_anywhere(changes: dict[str, float], where: str) -> None:
    """All in the first groups, or the last, or spread over them."""
    logits = torch.zeros(2, 5 * TILE + 7) - 30.0
    places = {"first": range(3, 15), "spread": range(5, 320, 29), "last": range(5 * TILE - 6, 5 * TILE + 7)}[where]
    for number, place in enumerate(places):
        logits[:, place] = torch.tensor([0.1 * number, 3.0 - 0.7 * number])
    assert_same_filter(logits, filters(2, **changes))


def test_top_p_within_one_group_is_found_there() -> None:
    """All likely tokens side by side: of the group's largest alone a smaller share is known."""
    logits = torch.full((1, 4 * TILE), -30.0)
    logits[0, 16:24] = torch.arange(8.0)
    parameters = filters(1, temperature=1.0, top_p=0.9)
    (read,) = searched(logits, parameters)
    assert read is not None
    assert len(read) == GROUP
    assert assert_same_filter(logits, parameters).nonzero()[:, 1].tolist() == [21, 22, 23]


def test_top_p_is_of_the_weight_that_min_p_keeps() -> None:
    """Of the weights 1, 0.6, 0.5 and 0.4 three are three quarters, whatever else min-p hides."""
    logits = torch.full((1, 4 * TILE), -30.0)
    for place, weight in zip(range(3, 4 * TILE, 10), [1.0, 0.6, 0.5, 0.4] + [0.1] * 20, strict=False):
        logits[0, place] = torch.tensor(weight).log()
    parameters = filters(1, temperature=1.0, top_p=0.75, min_p=0.3)
    assert searched(logits, parameters) != [None]
    assert assert_same_filter(logits, parameters).nonzero()[:, 1].tolist() == [3, 13, 23]


def test_a_flat_row_is_searched_as_a_whole() -> None:
    logits = torch.linspace(0.0, 1e-3, 6 * TILE)[torch.randperm(6 * TILE, generator=torch.Generator().manual_seed(1))]
    parameters = filters(1, top_p=0.7)
    assert searched(logits[None], parameters) == [None]
    assert_same_filter(logits[None], parameters)


def test_more_tokens_of_top_k_than_groups() -> None:
    logits = model_logits(1, 9 * GROUP)
    parameters = filters(1, temperature=1.0, top_k=10)
    assert searched(logits, parameters) == [None]
    assert assert_same_filter(logits, parameters).count_nonzero() == 10


def test_what_a_mask_leaves_is_searched_whatever_is_asked_for() -> None:
    """A grammar leaves few tokens: fewer than top-k asks for, in few groups."""
    logits = torch.full((1, 20 * GROUP), float("-inf"))
    logits[0, [3, 70, 71, 150]] = torch.tensor([1.0, 2.0, 4.0, 3.0])
    for changes, expected in (({"top_k": 9}, [3, 70, 71, 150]), ({"top_p": 0.999999}, [3, 70, 71, 150]),
                              ({"top_p": 0.6}, [71]), ({"top_k": 2}, [71, 150])):  # fmt: skip
        parameters = filters(1, temperature=1.0, **changes)
        assert searched(logits, parameters) != [None]
        assert assert_same_filter(logits, parameters).nonzero()[:, 1].tolist() == expected


def test_a_large_vocabulary_has_larger_groups() -> None:
    """More groups than a program holds are not made."""
    vocabularies = (1, MOST_GROUPS, MOST_GROUPS + 1, 151_936, 262_144, 262_145)
    assert [least_group(vocab) for vocab in vocabularies] == [1, 1, 2, 64, 64, 128]
    logits = model_logits(1, 20 * MOST_GROUPS)
    parameters = filters(1, temperature=0.6, top_k=7, top_p=0.9)
    found = lowest_kept(*(each.to(DEVICE) for each in (logits, *parameters)), SERVING_TILE, 1).cpu()
    expected = lowest_kept_reference(logits, *parameters)
    assert expected is not None
    assert ((logits >= found[:, None]) == (logits >= expected[:, None])).all()


def test_as_many_groups_as_fit_are_searched_and_no_more() -> None:
    """Each likely token in a group of its own; two groups are copied at a time."""
    for num_groups in (MOST_KEPT, MOST_KEPT + 1):
        logits = torch.full((1, 12 * GROUP), -30.0)
        logits[0, 3 : num_groups * GROUP : GROUP] = torch.arange(float(num_groups))
        (read,) = searched(logits, filters(1, temperature=1.0, top_k=num_groups), tile=2 * GROUP)
        if num_groups > MOST_KEPT:
            assert read is None
        else:
            assert read is not None
            assert [each for each in read if each > float("-inf")] == list(range(num_groups))


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
