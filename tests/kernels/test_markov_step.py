"""A step of the Markov head is what a loop over its equations gives, by the kernel and by its reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dflash_kernels.markov_step import markov_step, markov_step_reference
from tests.kernels.inputs import DEVICE, random

StepForm = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
FORMS = [markov_step] if torch.cuda.is_available() else [markov_step_reference, markov_step]
VOCAB = 40


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def step(request: pytest.FixtureRequest) -> StepForm:
    return request.param


def inputs(num_rows: int, rank: int, recurrent: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A step's arguments. The projected outputs are every other row of a larger tensor, as those of one place are."""
    parts = 3 if recurrent else 1
    previous = torch.arange(num_rows, device=DEVICE) * 7 % VOCAB
    found = {
        "previous": previous,
        "table": random(VOCAB, rank, seed=1).to(dtype),
        "projected": random(2 * num_rows, parts * rank, seed=2).to(dtype)[1::2],
        "weight": (random(parts * rank, (2 if recurrent else 1) * rank, seed=3) / rank**0.5).to(dtype),
    }
    return found | ({"state": random(num_rows, rank, seed=4)} if recurrent else {})


def by_hand(args: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In float64, a number at a time."""
    double = {name: tensor.cpu().double() for name, tensor in args.items() if name != "previous"}
    embeddings = double["table"][args["previous"].cpu()]
    rank = embeddings.shape[1]
    latent, following = torch.zeros_like(embeddings), torch.zeros_like(embeddings)
    for row, embedding in enumerate(embeddings):
        x, state = double["projected"][row], double["state"][row] if "state" in args else None
        for i in range(rank):
            if state is None:
                gate = torch.sigmoid(x[i] + (double["weight"][i] * embedding).sum())
                latent[row, i] = gate * embedding[i]
                continue
            raw = [
                x[part * rank + i]
                + (double["weight"][part * rank + i, :rank] * state).sum()
                + (double["weight"][part * rank + i, rank:] * embedding).sum()
                for part in range(3)
            ]
            gate = torch.sigmoid(raw[0])
            following[row, i] = gate * state[i] + (1 - gate) * torch.tanh(raw[1])
            latent[row, i] = torch.tanh(raw[2])
    return latent, following if "state" in args else None


@pytest.mark.parametrize("recurrent", [False, True], ids=["gated", "recurrent"])
@pytest.mark.parametrize(("num_rows", "rank"), [(1, 1), (3, 6), (2, 16), (1, 100)])
def test_a_step_is_what_its_equations_give(step: StepForm, num_rows: int, rank: int, recurrent: bool) -> None:
    args = inputs(num_rows, rank, recurrent)
    found, expected = step(**args), by_hand(args)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours.cpu().double(), theirs, atol=1e-5, rtol=1e-5)


def test_a_wide_head_is_made_by_several_programs(step: StepForm) -> None:
    args = inputs(2, 256, recurrent=True)
    for ours, theirs in zip(step(**args), markov_step_reference(**{k: v.cpu() for k, v in args.items()}), strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recurrent", [False, True], ids=["gated", "recurrent"])
def test_the_latent_has_the_tables_dtype_and_the_state_is_exact(step: StepForm, recurrent: bool) -> None:
    latent, state = step(**inputs(2, 8, recurrent, dtype=torch.float16))
    assert latent.dtype == torch.float16
    assert state is None or state.dtype == torch.float32


def test_the_state_before_is_left_as_it_was(step: StepForm) -> None:
    args = inputs(2, 8, recurrent=True)
    before = args["state"].clone()
    step(**args)
    assert torch.equal(args["state"], before)


@pytest.mark.parametrize("recurrent", [False, True], ids=["gated", "recurrent"])
def test_a_step_without_rows_gives_none(step: StepForm, recurrent: bool) -> None:
    latent, _ = step(**inputs(0, 8, recurrent))
    assert latent.shape == (0, 8)
