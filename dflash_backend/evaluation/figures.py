"""Reads a server's `spec_stats`, and takes the mean that published figures are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.spec_stats import SpecDecodingStats


def parse_spec_stats(stats: Mapping[str, Any]) -> SpecDecodingStats:
    """The counts in a server's `spec_stats`. Raises `EvaluationError` when one is missing or no count."""
    per_position = stats.get("num_accepted_tokens_per_pos")
    if not isinstance(per_position, list):
        raise _no_count("num_accepted_tokens_per_pos", per_position)
    return SpecDecodingStats(
        _count("num_drafts", stats.get("num_drafts")),
        _count("num_draft_tokens", stats.get("num_draft_tokens")),
        _count("num_accepted_tokens", stats.get("num_accepted_tokens")),
        [_count("num_accepted_tokens_per_pos", value) for value in per_position],
    )


def mean_acceptance_length(requests: Iterable[SpecDecodingStats]) -> float | None:
    """The mean of each request's acceptance length, over the requests that had drafts; None where none had.

    Published figures are this mean (the DFlash authors' `benchmark.py`, vLLM's `test_dflash_acceptance_rates`): a long
    answer weighs as much as a short one. Their total's `acceptance_length`
    weighs them by their steps.
    """
    lengths = [counts.acceptance_length for counts in requests if counts.num_drafts]
    return sum(lengths) / len(lengths) if lengths else None


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _no_count(name, value)
    return value


def _no_count(name: str, value: object) -> EvaluationError:
    return EvaluationError(
        f"the server's spec_stats have {value!r} for '{name}'; only a model that dflash-triton serves can be evaluated"
    )
