"""The derived figures, from counts: their definitions, no drafts at all, sums, and what a server sends."""

from __future__ import annotations

import pytest

from dflash_backend.evaluation import EvaluationError
from dflash_backend.evaluation.figures import mean_acceptance_length, parse_spec_stats
from dflash_backend.messages import RequestStats
from dflash_backend.spec_stats import SpecDecodingStats

COUNTS = SpecDecodingStats(4, 12, 6, [3, 2, 1])


def test_the_derived_figures_are_those_of_the_contract() -> None:
    assert COUNTS.acceptance_length == 1 + 6 / 4
    assert COUNTS.draft_tokens_per_step == 12 / 4
    assert COUNTS.acceptance_rate == 6 / 12
    assert COUNTS.per_position_rates == (3 / 4, 2 / 4, 1 / 4)
    assert 1 + sum(COUNTS.per_position_rates) == COUNTS.acceptance_length


@pytest.mark.parametrize("per_position", [[], [0, 0, 0]])
def test_without_drafts_a_step_yields_one_token_and_there_are_no_rates(per_position: list[int]) -> None:
    none = SpecDecodingStats(num_accepted_tokens_per_pos=per_position)
    assert none.acceptance_length == 1
    assert none.per_position_rates == ()
    assert none.acceptance_rate is None
    assert none.draft_tokens_per_step is None


def test_counts_of_different_k_add_up_and_subtract_by_position() -> None:
    total = SpecDecodingStats.total([COUNTS, SpecDecodingStats(1, 1, 1, [1]), SpecDecodingStats()])
    assert total == SpecDecodingStats(5, 13, 7, [4, 2, 1])
    assert total - COUNTS == SpecDecodingStats(1, 1, 1, [1, 0, 0])
    assert SpecDecodingStats.total([]) == SpecDecodingStats()


def test_published_acceptance_lengths_are_means_over_requests() -> None:
    """A request of two steps and one of ten: the pooled figure leans to the longer one."""
    requests = [SpecDecodingStats(2, 30, 20, [2] * 10), SpecDecodingStats(10, 150, 10, [10]), SpecDecodingStats()]
    assert mean_acceptance_length(requests) == (11 + 2) / 2
    assert SpecDecodingStats.total(requests).acceptance_length == 1 + 30 / 12
    assert mean_acceptance_length([SpecDecodingStats()]) is None
    assert mean_acceptance_length([]) is None


def test_the_histogram_counts_the_steps_by_their_accepted_drafts() -> None:
    # Steps with 3, 2, 1 and 0 accepted drafts, and one of a request with k = 1.
    counts = SpecDecodingStats(4, 12, 6, [3, 2, 1]) + SpecDecodingStats(1, 1, 1, [1])
    assert counts.accepted_histogram == (1, 2, 1, 1)
    assert sum(counts.accepted_histogram) == counts.num_drafts
    assert sum(n * count for n, count in enumerate(counts.accepted_histogram)) == counts.num_accepted_tokens
    assert SpecDecodingStats().accepted_histogram == ()


def test_counts_of_a_request_and_of_spec_stats_are_the_same() -> None:
    stats = RequestStats(9, 10, 0, SpecDecodingStats(4, 12, 6, [3, 2, 1]), 0, 0.0)
    sent = {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [3, 2, 1],
        "acceptance_length": 2.5,
    }
    assert stats.spec_decoding == parse_spec_stats(sent) == COUNTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_drafts", None),
        ("num_draft_tokens", "12"),
        ("num_accepted_tokens", -1),
        ("num_accepted_tokens_per_pos", 3),
        ("num_accepted_tokens_per_pos", [1, True]),
    ],
)
def test_spec_stats_that_do_not_count_are_refused_by_name(field: str, value: object) -> None:
    sent = COUNTS.as_dict() | {field: value}
    with pytest.raises(EvaluationError, match=f"'{field}'; only a model that dflash-triton serves"):
        parse_spec_stats(sent)
