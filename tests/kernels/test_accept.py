"""The decision about a row's drafts, in both forms, on rows for which the right distribution is known beforehand.

That the two forms agree with `sampling.verify` on arbitrary rows is in `tests/worker/test_step_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare

from dflash_kernels.accept import accept, accept_reference
from tests.kernels.inputs import DEVICE

K = 5
VOCAB = 4
DRAFT, OTHERS = 1, (0, 2, 3)
Accept = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# The interpreter runs the kernel row by row, so that it gets few rows; on a GPU it gets as many as the reference.
FORMS = [
    pytest.param(accept, 4000 if torch.cuda.is_available() else 60, id="kernel"),
    pytest.param(accept_reference, 4000, id="reference"),
]


def decided(decide: Accept, num_rows: int, p: list[float], q: list[float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts of each row, and the token after them. Every draft is `DRAFT`, the target has `p` everywhere, and
    drafts were drawn from `q`, or were the drafter's most likely tokens. Rows differ in their seeds alone."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE).repeat(num_rows)

    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    probs = torch.tensor(p, device=DEVICE).repeat(num_rows * (K + 1), 1)
    count, tokens = decide(
        probs.argmax(dim=1),
        probs,
        None if q is None else torch.tensor(q, device=DEVICE).repeat(num_rows, K, 1),
        torch.full((num_rows, 32), DRAFT, device=DEVICE),
        ints(7),
        1000 + 7 * torch.arange(num_rows, device=DEVICE),
        K,
        rows,
        ints(7),
        ints(1),
        ints(K),
        rows * (K + 1),
        ints(1),
        3,
        1,
    )
    return count.cpu().long(), tokens.cpu().gather(1, count.cpu().long()[:, None]).squeeze(1)


@pytest.mark.parametrize(("decide", "num_rows"), FORMS)
@pytest.mark.parametrize(("p", "q"), [([0.2, 0.6, 0.2, 0.0], None), ([0.25, 0.3, 0.25, 0.2], [0.2, 0.5, 0.2, 0.1])])
def test_each_draft_is_judged_by_a_random_number_of_its_own(
    decide: Accept, num_rows: int, p: list[float], q: list[float] | None
) -> None:
    """Then as many drafts are accepted as a coin comes up heads in a row; with one number for all it is all or none."""
    chance = p[DRAFT] / (1.0 if q is None else q[DRAFT])
    count, _ = decided(decide, num_rows, p, q)
    expected = [num_rows * chance**n * (1 - chance) for n in range(K)] + [num_rows * chance**K]
    assert chisquare(torch.bincount(count, minlength=K + 1).numpy(), expected).pvalue > 0.01


@pytest.mark.parametrize(("decide", "num_rows"), FORMS if torch.cuda.is_available() else FORMS[1:])
@pytest.mark.parametrize("q", [None, [0.1, 0.5, 0.4, 0.0]])
def test_a_rejected_draft_is_replaced_by_a_draw_from_what_is_left(
    decide: Accept, num_rows: int, q: list[float] | None
) -> None:
    p = [0.2, 0.3, 0.1, 0.4]
    count, following = decided(decide, num_rows, p, q)
    left = [max(a - b, 0.0) for a, b in zip(p, q or [0.0, 1.0, 0.0, 0.0], strict=True)]
    assert not following[count < K].eq(DRAFT).any()
    seen = torch.bincount(following[count < K], minlength=VOCAB)
    places = [token for token in OTHERS if left[token] > 0]
    assert seen.sum() == seen[places].sum() > num_rows / 2
    expected = [left[token] / sum(left) * int(seen.sum()) for token in places]
    assert chisquare(seen[places].numpy(), expected).pvalue > 0.01


@pytest.mark.parametrize(("decide", "num_rows"), FORMS if torch.cuda.is_available() else FORMS[1:])
def test_after_the_last_accepted_draft_a_token_of_the_target_follows(decide: Accept, num_rows: int) -> None:
    p = [0.05, 0.8, 0.05, 0.1]
    count, following = decided(decide, num_rows, p, p)
    assert count.tolist() == [K] * num_rows
    seen = torch.bincount(following, minlength=VOCAB)
    assert chisquare(seen.numpy(), [num_rows * chance for chance in p]).pvalue > 0.01
