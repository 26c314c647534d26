"""The delta rule in chunks is the rule token by token, by the kernels and by their reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from dflash_kernels import delta_chunks, delta_rule
from dflash_kernels.delta_rule import CHUNK, DeltaBlock, DeltaInputs, advance, recurrent
from tests.kernels.inputs import DEVICE, random

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


class Form(NamedTuple):
    """The functions that a layer calls."""

    name: str
    block: Callable[[DeltaInputs, torch.Tensor], DeltaBlock]
    chunked: Callable[[DeltaInputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


KERNELS = Form("kernels", delta_chunks.delta_block, delta_chunks.chunked)
FORMS = [KERNELS] if torch.cuda.is_available() else [Form("torch", delta_rule.delta_block, delta_rule.chunked), KERNELS]


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def tokens(num_rows: int, width: int, num_heads: int = 2, key_dim: int = 8, value_dim: int = 12) -> DeltaInputs:
    """Random tokens with normalised keys, as the layer gives them."""
    shape = num_rows, num_heads, width
    queries, keys = (torch.nn.functional.normalize(random(*shape, key_dim, seed=seed), dim=-1) for seed in (1, 2))
    values = random(*shape, value_dim, seed=3)
    return DeltaInputs(queries, keys, values, random(*shape, seed=4).sigmoid(), -random(*shape, seed=5).exp())


def state_of(given: DeltaInputs) -> torch.Tensor:
    num_rows, num_heads, _, key_dim = given.keys.shape
    return random(num_rows, num_heads, key_dim, given.values.shape[3], seed=6)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 12), (16, 16), (20, 40), (32, 64)])
@pytest.mark.parametrize("width", [1, 17, 64, 65, 150])
def test_a_prompt_gives_what_transformers_gives_token_by_token(
    form: Form, width: int, key_dim: int, value_dim: int
) -> None:
    given = tokens(2, width, 2, key_dim, value_dim)
    state = state_of(given)
    outputs, after = form.chunked(given, state)
    queries, keys, values, beta, log_decay = (each.transpose(1, 2) for each in given)
    wanted, wanted_after = torch_recurrent_gated_delta_rule(
        queries * key_dim**0.5, keys, values, log_decay, beta, initial_state=state, output_final_state=True
    )
    torch.testing.assert_close(outputs.transpose(1, 2), wanted, **CLOSE)
    torch.testing.assert_close(after, wanted_after, **CLOSE)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33, 64])
def test_a_block_says_what_every_number_of_its_tokens_leaves(form: Form, width: int) -> None:
    given = tokens(3, width)
    state = state_of(given)
    block, wanted = form.block(given, state), delta_rule.delta_block(given, state)
    for found, right in zip(block, wanted, strict=True):
        torch.testing.assert_close(found, right, **CLOSE)
    torch.testing.assert_close(block.outputs, recurrent(given, state)[0], **CLOSE)
    for count in {0, 1, width // 2, width}:
        _, after = recurrent(DeltaInputs(*(each[:, :, :count] for each in given)), state)
        kept = torch.full((3,), count, device=DEVICE)
        torch.testing.assert_close(advance(state, given.keys, block, kept), after, **CLOSE)


def test_the_state_before_is_left_as_it_was(form: Form) -> None:
    given = tokens(1, 70)
    state = state_of(given)
    before = state.clone()
    form.chunked(given, state)
    form.block(DeltaInputs(*(each[:, :, :20] for each in given)), state)
    assert torch.equal(state, before)


def test_a_key_that_repeats_itself_loses_no_digits(form: Form) -> None:
    """Of one key without decay the system is all ones below its diagonal, whose powers are as large as 10^18."""
    given = tokens(1, CHUNK)
    ones = torch.ones_like(given.beta)
    given = given._replace(keys=given.keys[:, :, :1].expand_as(given.keys), beta=ones, log_decay=0.0 * ones)
    state = state_of(given)
    torch.testing.assert_close(form.block(given, state).outputs, recurrent(given, state)[0], **CLOSE)


@pytest.mark.parametrize("log_decay", [0.0, -30.0])
def test_a_state_of_any_decay_has_finite_numbers(form: Form, log_decay: float) -> None:
    given = tokens(1, 100)
    given = given._replace(log_decay=torch.full_like(given.log_decay, log_decay))
    state = state_of(given) * 1e3
    outputs, after = form.chunked(given, state)
    wanted, wanted_after = recurrent(given, state)
    torch.testing.assert_close(outputs, wanted, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(after, wanted_after, atol=1e-3, rtol=1e-4)


def test_tokens_that_are_not_there_change_nothing(form: Form) -> None:
    """Padding has neither rate nor decay: rows of a group have different lengths."""
    given, lens = tokens(3, 40), torch.tensor([40, 7, 0], device=DEVICE)
    missing = (torch.arange(40, device=DEVICE) >= lens[:, None])[:, None]
    padded = given._replace(
        beta=given.beta.masked_fill(missing, 0.0), log_decay=given.log_decay.masked_fill(missing, 0.0)
    )
    state = state_of(given)
    block = form.block(padded, state)
    after = form.chunked(padded, state)[1]
    for row, length in enumerate(lens.tolist()):
        own = DeltaInputs(*(each[row : row + 1, :, :length] for each in given))
        outputs, own_after = recurrent(own, state[row : row + 1])
        torch.testing.assert_close(block.outputs[row : row + 1, :, :length], outputs, **CLOSE)
        torch.testing.assert_close(after[row : row + 1], own_after, **CLOSE)


def test_no_rows_and_no_tokens_are_possible() -> None:
    for given in (tokens(0, 5), tokens(1, 5)._replace(), tokens(2, 70)):
        outputs, after = delta_chunks.chunked(given, state_of(given))
        assert outputs.shape == given.values.shape
        assert after.shape == state_of(given).shape


def test_a_block_that_is_too_long_is_refused() -> None:
    given = tokens(1, CHUNK + 1)
    with pytest.raises(ValueError, match="at most 64 tokens, not 65"):
        delta_chunks.delta_block(given, state_of(given))
