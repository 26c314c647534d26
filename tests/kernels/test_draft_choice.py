"""Whose drafts are verified where both a model and prompt lookup have some: the kernel beside its reference, and what
the choice follows."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.draft_choice import GAIN_WEIGHT, MOST_GAIN, choose_drafts, choose_drafts_reference

K, MAX_LEN = 5, 40
FORMS = [choose_drafts] if torch.cuda.is_available() else [choose_drafts_reference, choose_drafts]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class State:
    """One request's, with a step's row: `step` says what lookup and the model propose, and what became of the block
    before."""

    def __init__(self, form: object, gain: float = 0.0) -> None:
        self.form = form
        self.tokens = torch.zeros(2, MAX_LEN, dtype=torch.int64, device=DEVICE)
        self.computed = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
        self.other = torch.zeros(2, K, dtype=torch.int64, device=DEVICE)
        self.num_other = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.gain = torch.tensor([0.0, gain], device=DEVICE)

    def step(
        self,
        came: list[int],
        num_draft: int,
        model: list[int],
        found: list[int],
        num_found: int | None = None,
    ) -> int:
        """came: the tokens of the step, the accepted drafts and the one after them. Returns how many of lookup's are
        taken."""
        anchor = int(self.computed[1]) + len(came)
        self.tokens[1, anchor - len(came) + 1 : anchor + 1] = torch.tensor(came, device=DEVICE)
        self.tokens[1, anchor + 1 : anchor + 1 + len(model)] = torch.tensor(model, dtype=torch.int64, device=DEVICE)
        self.computed[1] = anchor
        results = torch.zeros(1, K + 3, dtype=torch.int64, device=DEVICE)
        results[0, 0] = len(came) - 1

        def row(number: int) -> torch.Tensor:
            return torch.tensor([number], dtype=torch.int32, device=DEVICE)

        padded = torch.tensor([found + [0] * (K - len(found))], device=DEVICE)
        taken = self.form(  # type: ignore[operator]
            self.tokens, self.computed, self.other, self.num_other, self.gain, row(1), row(num_draft),
            row(len(model)), results, padded, row(len(found) if num_found is None else num_found),
        )  # fmt: skip
        return int(taken[0])


@pytest.mark.parametrize("form", FORMS)
def test_lookup_is_taken_until_the_model_would_have_had_more(form: object) -> None:
    state = State(form)
    assert state.step([7], 0, model=[1, 2, 3, 4, 5], found=[8, 9, 10, 11, 12]) == 5
    assert state.num_other.tolist() == [0, 5]
    # Lookup's drafts are wrong at once; the model's first one is right, and four more might have been.
    assert state.step([1], 5, model=[2, 3, 4, 5, 6], found=[8, 9, 10, 11, 12]) == 0
    assert state.gain[1].item() == pytest.approx(GAIN_WEIGHT * -(1 + 4 / 2))
    assert state.num_other.tolist() == [0, -5]
    # The model's are taken and have three; lookup's would have had none.
    before = state.gain[1].item()
    assert state.step([2, 3, 4, 9], 5, model=[5, 6, 7, 8, 9], found=[], num_found=0) == 0
    assert state.gain[1].item() == pytest.approx(before + GAIN_WEIGHT * (-3 - before))
    assert state.num_other.tolist() == [0, 0]


@pytest.mark.parametrize("form", FORMS)
def test_lookup_is_taken_again_when_it_would_have_had_more(form: object) -> None:
    state = State(form, gain=-0.5)
    assert state.step([7], 0, model=[1, 2, 3, 4, 5], found=[8, 9, 10, 11, 12]) == 0
    # The model's are wrong at once, and lookup's first one is right.
    taken = state.step([8], 5, model=[1, 2, 3, 4, 5], found=[9, 10, 11, 12, 13])
    assert state.gain[1].item() == pytest.approx(-0.5 + GAIN_WEIGHT * (3 + 0.5))
    assert taken == 5
    assert state.step([9, 10, 11, 30], 5, model=[1], found=[], num_found=0) == 0
    assert state.gain[1].item() > 0.3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gain", [MOST_GAIN, -MOST_GAIN])
def test_a_gain_has_a_bound_either_way(form: object, gain: float) -> None:
    state = State(form, gain)
    right, wrong = [1, 2, 3, 4, 5], [9, 9, 9, 9, 9]
    for _ in range(3):
        model, found = (wrong, right) if gain > 0 else (right, wrong)
        state.step([7], 0, model, found)
        state.step([*right, 6], 5, [], [], num_found=0)
        assert state.gain[1].item() == gain


@pytest.mark.parametrize("form", FORMS)
def test_where_both_propose_the_same_neither_gains(form: object) -> None:
    state = State(form, gain=0.25)
    drafts = [1, 2, 3, 4, 5]
    assert state.step([7], 0, drafts, drafts) == 5
    assert state.step([1, 2, 3, 4, 5, 6], 5, drafts, drafts) == 5
    assert state.step([1, 2, 9], 5, drafts, drafts) == 5
    assert state.gain[1].item() == pytest.approx(0.25 * (1 - GAIN_WEIGHT) ** 2)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_that_no_step_verified_say_nothing(form: object) -> None:
    state = State(form)
    state.step([7], 0, [1, 2, 3], [8, 9, 10])
    assert state.step([1], 0, [2, 3, 4], [], num_found=0) == 0
    assert state.gain[1].item() == 0.0
    assert state.num_other.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_does_what_the_reference_does(seed: int) -> None:
    """Random states of nine requests, five with rows, beside two rows of padding; some end past the last position."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    rows = torch.tensor([3, -1, 0, 8, 5, 1, -1], dtype=torch.int32)
    num_draft, num_next = numbers(0, K + 1, 7), numbers(0, K + 1, 7)
    results = torch.zeros(7, K + 3, dtype=torch.int64)
    results[:, 0] = (torch.rand(7, generator=draw) * (num_draft + 1)).long()
    state = (
        numbers(0, 2, 9, MAX_LEN, dtype=torch.int64),
        numbers(K, MAX_LEN + 2, 9),
        numbers(0, 2, 9, K, dtype=torch.int64),
        numbers(-K, K + 1, 9),
        torch.randn(9, generator=draw),
    )
    found, num_found = numbers(0, 2, 7, K, dtype=torch.int64), numbers(0, 2, 7) * num_next
    step = rows, num_draft, num_next, results, found, num_found
    outputs = []
    for form in (choose_drafts_reference, choose_drafts):
        device = torch.device("cpu") if form is choose_drafts_reference else DEVICE
        mine = tuple(each.clone().to(device) for each in state)
        taken = form(*mine, *(each.to(device) for each in step))
        outputs.append([each.cpu() for each in (taken, *mine)])
    for expected, each in zip(*outputs, strict=True):
        torch.testing.assert_close(each, expected)
