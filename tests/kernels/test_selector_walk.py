"""The walk along a block chooses what a loop in plain Python chooses, by the kernel and by its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dflash_kernels.selector_walk import selector_walk, selector_walk_reference
from tests.kernels.inputs import DEVICE, random

Walk = Callable[..., tuple[torch.Tensor, torch.Tensor]]
FORMS = [selector_walk] if torch.cuda.is_available() else [selector_walk_reference, selector_walk]
VOCAB = 50


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def walk(request: pytest.FixtureRequest) -> Walk:
    return request.param


@dataclass(frozen=True)
class Case:
    """Rows of drafts to walk along."""

    scores: torch.Tensor
    candidates: torch.Tensor
    hidden: torch.Tensor
    predecessors: torch.Tensor
    successors: torch.Tensor
    anchors: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def random(cls, lens: list[int], num_candidates: int, rank: int) -> Case:
        n, generator = sum(lens), torch.Generator().manual_seed(5)
        order = torch.stack([torch.randperm(VOCAB, generator=generator)[:num_candidates] for _ in range(n)])
        starts = torch.tensor([0, *lens]).cumsum(0)
        anchors = torch.randint(VOCAB, (len(lens),), generator=generator)
        return cls(
            random(n, num_candidates),
            order.to(DEVICE),
            random(n, rank, seed=1),
            random(VOCAB, rank, seed=2),
            random(VOCAB, rank, seed=3),
            anchors.to(DEVICE),
            starts.to(DEVICE),
        )

    def by_hand(self, temperature: torch.Tensor | None = None) -> tuple[list[int], torch.Tensor]:
        """The choices, and the edges to each draft's candidates, in float64."""
        chosen, edges = [], torch.zeros(self.scores.shape, dtype=torch.float64)
        starts, candidates = self.starts.tolist(), self.candidates.tolist()
        for row, anchor in enumerate(self.anchors.tolist()):
            previous = anchor
            for draft in range(starts[row], starts[row + 1]):
                hidden, context = self.hidden[draft].cpu().double(), self.predecessors[previous].cpu().double()
                for i, candidate in enumerate(candidates[draft]):
                    edges[draft, i] = (context * hidden * self.successors[candidate].cpu().double()).sum()
                divisor = 1.0 if temperature is None else float(temperature[draft]) or 1.0
                chosen.append(int((self.scores[draft].cpu().double() + edges[draft] / divisor).argmax()))
                previous = candidates[draft][chosen[-1]]
        return chosen, edges


@pytest.mark.parametrize("lens", [[1], [7, 7, 7], [3, 0, 1, 15]])
@pytest.mark.parametrize(("num_candidates", "rank"), [(1, 1), (2, 3), (6, 8), (16, 64), (16, 100), (33, 256)])
def test_each_choice_follows_the_one_before_it(walk: Walk, lens: list[int], num_candidates: int, rank: int) -> None:
    case = Case.random(lens, num_candidates, rank)
    chosen, edges = walk(**vars(case))
    expected, expected_edges = case.by_hand()
    assert chosen.tolist() == expected
    torch.testing.assert_close(edges.cpu().double(), expected_edges, atol=1e-4, rtol=1e-4)


def test_edges_are_divided_where_scores_were(walk: Walk) -> None:
    case = Case.random([7, 7], 16, 8)
    temperature = torch.tensor([2.5] * 7 + [0.0] * 7, device=DEVICE)
    chosen, edges = walk(**vars(case), temperature=temperature)
    plain, plain_edges = walk(**vars(case))
    expected, expected_edges = case.by_hand(temperature)
    assert chosen.tolist() == expected != plain.tolist()
    assert chosen[7:].tolist() == plain[7:].tolist()
    torch.testing.assert_close(edges.cpu().double(), expected_edges, atol=1e-4, rtol=1e-4)
    assert torch.equal(edges[7:], plain_edges[7:])


def test_the_first_among_equals_is_chosen(walk: Walk) -> None:
    case = Case.random([4], 5, 3)
    case.scores.zero_()
    case.successors.zero_()
    assert walk(**vars(case))[0].tolist() == [0] * 4


def test_what_is_no_number_leads_to_some_candidate(walk: Walk) -> None:
    case = Case.random([3], 5, 3)
    case.scores.fill_(float("nan"))
    assert all(0 <= index < 5 for index in walk(**vars(case))[0].tolist())


def test_no_rows_and_rows_without_drafts_are_walked(walk: Walk) -> None:
    for lens in ([], [0, 0]):
        chosen, edges = walk(**vars(Case.random([1], 4, 3)) | empty(lens))
        assert (chosen.shape, edges.shape) == ((0,), (0, 4))


def empty(lens: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of rows that have no drafts."""
    ids = torch.zeros(0, 4, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(len(lens) + 1, dtype=torch.int64, device=DEVICE)
    return {
        "scores": ids.float(),
        "candidates": ids,
        "hidden": torch.zeros(0, 3, device=DEVICE),
        "anchors": starts[1:].clone(),
        "starts": starts,
    }
