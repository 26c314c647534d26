"""Requests as short as a health check's, with a step in flight: shorter than a block of drafts, or of one token.

The bounds that a step is planned with are cut where such a request ends, so they are unlike those of any longer one.
`test_random_overlap.py` mixes them with everything else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_backend.worker.logits import special_rows
from tests.worker.engines import engine, on_device_runner, outputs_of

pytestmark = pytest.mark.usefixtures("single_thread")
K = 7


@pytest.mark.parametrize("prompt_len", range(1, K + 1))
def test_a_request_shorter_than_its_drafts_ends_as_it_does_without_overlap(
    settings: dict[str, Any], prompt_len: int
) -> None:
    """Every length of output up to one past a whole block of drafts, all in one engine."""
    lengths = range(1, K + 3)
    sampling = [{"max_tokens": n, "temperature": 0.0} for n in lengths]
    expected, found = (
        outputs_of(built, [[5 + n] * prompt_len for n in lengths], sampling).tokens
        for built in (engine(**settings), on_device_runner(engine(**settings)))
    )
    assert found == expected
    assert [len(output) for output in found.values()] == list(lengths)


def test_min_tokens_of_a_short_request_still_waits_for_what_is_in_flight(settings: dict[str, Any]) -> None:
    """The stop token is hidden for two tokens, though the bounds say that the request has ended."""
    sampling = {"max_tokens": 4, "min_tokens": 2, "stop_token_ids": tuple(range(1, 97)), "temperature": 0.0}
    expected, found = (
        outputs_of(built, [[5] * prompt_len for prompt_len in (1, 2, 3)], [sampling] * 3).tokens
        for built in (engine(**settings), on_device_runner(engine(**settings)))
    )
    assert found == expected
    assert all(len(output) >= 2 for output in found.values())


def test_a_short_request_beside_one_with_a_bias_is_not_special() -> None:
    """Its lowest start is below 0 with a block of drafts in flight; it has no `min_tokens` to hide stop tokens for."""
    batch = SimpleNamespace(
        req_idx=np.arange(2),
        start_bound=np.array([1, 9]),
        num_new=np.ones(2, np.int64),
        num_unverified_drafts=np.array([K, 0]),
        sample=np.ones(2, bool),
    )
    biased = np.array([False, True])
    none = np.zeros(2, bool)
    requests = SimpleNamespace(
        num_processed=1,
        min_end=np.zeros(2, np.int64),
        biased=biased,
        masked=none,
        penalised=none,
        num_logprobs=np.full(2, -1),
    )
    assert special_rows(batch, requests).tolist() == [1]  # type: ignore[arg-type]
