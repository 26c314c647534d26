"""Log-probabilities, ranks and the most likely tokens: the reference is plain Python's, and C++ gives the same."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_kernels import cpu_ops
from dflash_kernels.logprobs import most_likely, ranked_logprobs_reference
from tests.kernels.inputs import random
from tests.kernels.test_cpu_ops import DTYPES, needs_library

# Of less than a vector, of whole groups of 64, of a group and some, of many tiles.
VOCABS = [1, 5, 64, 128, 131, 5003]


def rows_of(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of which many are equal, some hidden, of some rows all but one."""
    logits = (random(6, vocab, seed=vocab) * torch.tensor([0.1, 1, 4, 30, 200, 1])[:, None]).to(dtype)
    logits[1] = (logits[1] * 2).round()
    logits[2, ::3] = float("-inf")
    logits[3, vocab // 2 :] = 0.0
    logits[3, vocab // 3 :: 2] = -0.0
    logits[5, 1:] = float("-inf")
    return logits


def test_the_reference_is_what_plain_python_says() -> None:
    logits, ids = torch.tensor([[1.0, 3.0, 3.0, 5.0], [0.0, -1.0, 0.5, 0.0]]), torch.tensor([[0, 2], [1, 3]])
    found = ranked_logprobs_reference(logits, ids, 3)
    for row, own, asked in zip(found.tolist(), logits.tolist(), ids.tolist(), strict=True):
        total = math.log(sum(map(math.exp, own)))
        order = sorted(range(4), key=lambda token: (-own[token], token))[:3]
        assert row[:2] == pytest.approx([own[token] - total for token in asked], abs=1e-6)
        assert row[2:4] == [sum(each >= own[token] for each in own) for token in asked]
        assert row[4:7] == pytest.approx([own[token] - total for token in order], abs=1e-6)
        assert row[7:] == order


def test_equally_likely_tokens_come_in_the_order_of_their_ids_however_many_are_asked_for() -> None:
    scores = torch.randint(-3, 2, (5, 400), generator=torch.Generator().manual_seed(0)).float() - 0.5
    expected = scores.sort(dim=1, descending=True, stable=True).indices
    for count in (1, 4, 17, 400):
        assert torch.equal(most_likely(scores, count), expected[:, :count])


def assert_same(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> None:
    found, expected = (ranked(logits, ids, num_top) for ranked in (cpu_ops.ranked_logprobs, ranked_logprobs_reference))
    num_ids, top = ids.shape[1], min(num_top, logits.shape[1])
    assert found.dtype == torch.float64
    names = ("logprobs", "ranks", "likely logprobs", "likely ids")
    sizes = [num_ids, num_ids, top, top]
    for name, own, other in zip(names, found.split(sizes, dim=1), expected.split(sizes, dim=1), strict=True):
        tolerance = 2e-6 if "logprobs" in name else 0.0
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_those_of_the_cpp_are_the_references(vocab: int, dtype: torch.dtype) -> None:
    logits = rows_of(vocab, dtype)
    ids = torch.randint(vocab, (len(logits), 3), generator=torch.Generator().manual_seed(1))
    for num_ids, num_top in ((1, 0), (1, 1), (3, 2), (2, 20), (1, vocab), (3, vocab + 9)):
        assert_same(logits, ids[:, :num_ids], num_top)
    apart = torch.cat([logits, logits], dim=1)[:, vocab:]
    found = [cpu_ops.ranked_logprobs(each, ids, 4) for each in (apart, logits)]
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=0.0, equal_nan=True)
    assert_same(logits[:0], ids[:0], 2)


@needs_library
def test_a_row_is_the_same_alone_and_by_any_threads() -> None:
    logits = rows_of(5003, torch.float32)
    ids, threads = torch.arange(6)[:, None] * 700, torch.get_num_threads()
    together = cpu_ops.ranked_logprobs(logits, ids, 7)
    for count in (1, 3):
        torch.set_num_threads(count)
        alone = [cpu_ops.ranked_logprobs(logits[i : i + 1], ids[i : i + 1], 7) for i in range(6)]
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat(alone), together)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_what_the_reference_gives(odd: float, dtype: torch.dtype) -> None:
    logits = rows_of(200, dtype)
    logits[:, 77] = odd
    logits[4] = odd
    assert_same(logits, torch.tensor([[77], [3], [0], [77], [5], [0]]), 5)


@needs_library
def test_numbers_of_other_types_and_columns_that_lie_apart_have_the_reference() -> None:
    ids = torch.tensor([[3]])
    for logits in (random(1, 40).double(), random(40, 1).t(), random(1, 40).half()):
        assert torch.equal(cpu_ops.ranked_logprobs(logits, ids, 3), ranked_logprobs_reference(logits, ids, 3))


@needs_library
@pytest.mark.parametrize("token", [-1, 40, 2**40])
def test_a_token_that_has_no_logit_is_an_error(token: int) -> None:
    with pytest.raises(IndexError, match="from 0 to 39 have logits"):
        cpu_ops.ranked_logprobs(random(2, 40), torch.tensor([[3], [token]]), 1)
