"""The figures of speculative decoding, in one place: counts of drafts, and what is derived from them.

The names are those of the serving contract (`spec_stats`, the metrics), which are vLLM's. Used by `dflash-triton eval`,
`benchmarks` and the tests of published figures.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from dflash_backend.evaluation.errors import EvaluationError


class HasCounts(Protocol):
    """What the engine counts, for one request or since it started: `RequestStats` and `EngineStats` both have it."""

    @property
    def num_drafts(self) -> int:
        """Steps that had a draft block to verify."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Tokens in those blocks."""
        ...

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that stood."""
        ...

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """Entry i counts the drafts whose token i (0-based) stood."""
        ...


@dataclass(frozen=True, slots=True)
class SpecCounts:
    """Counts over any number of requests; add them with `+` or `SpecCounts.total`.

    How many draft tokens a block has may differ between requests: `num_accepted_tokens_per_pos` is as long as the
    longest.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @classmethod
    def of(cls, stats: HasCounts) -> SpecCounts:
        """The counts of one request, or of an engine."""
        per_position = tuple(stats.num_accepted_tokens_per_pos)
        return cls(stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, per_position)

    @classmethod
    def from_spec_stats(cls, stats: Mapping[str, Any]) -> SpecCounts:
        """The counts in a server's `spec_stats`. Raises `EvaluationError` when one is missing or no count."""
        per_position = stats.get("num_accepted_tokens_per_pos")
        if not isinstance(per_position, list):
            raise _no_count("num_accepted_tokens_per_pos", per_position)
        return cls(
            _count("num_drafts", stats.get("num_drafts")),
            _count("num_draft_tokens", stats.get("num_draft_tokens")),
            _count("num_accepted_tokens", stats.get("num_accepted_tokens")),
            tuple(_count("num_accepted_tokens_per_pos", value) for value in per_position),
        )

    @classmethod
    def total(cls, counts: Iterable[SpecCounts]) -> SpecCounts:
        """The sum; all zero without any."""
        return sum(counts, cls())

    def __add__(self, other: SpecCounts) -> SpecCounts:
        return self._combined(other, operator.add)

    def __sub__(self, earlier: SpecCounts) -> SpecCounts:
        """What an engine counted since `earlier`."""
        return self._combined(earlier, operator.sub)

    def _combined(self, other: SpecCounts, combine: Callable[[int, int], int]) -> SpecCounts:
        columns = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        return SpecCounts(
            combine(self.num_drafts, other.num_drafts),
            combine(self.num_draft_tokens, other.num_draft_tokens),
            combine(self.num_accepted_tokens, other.num_accepted_tokens),
            tuple(combine(mine, theirs) for mine, theirs in columns),
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a step with drafts yields: 1 + accepted / drafts; 1 without drafts. Over several requests
        this is pooled: each weighs by its number of steps."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_tokens_per_step(self) -> float | None:
        """Mean tokens of a draft block; None without drafts."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of draft tokens that stood; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def per_position_rates(self) -> tuple[float, ...]:
        """For each position, the share of drafts whose token there stood; empty without drafts.

        They add up to `acceptance_length - 1`.
        """
        if not self.num_drafts:
            return ()
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)

    @property
    def accepted_histogram(self) -> tuple[int, ...]:
        """Entry n counts the drafts of which n tokens stood, from 0 on; empty without drafts.

        Token i stands only with those before it, so that the counts by position say it all.
        """
        if not self.num_drafts:
            return ()
        at_least = (self.num_drafts, *self.num_accepted_tokens_per_pos, 0)
        return tuple(more - fewer for more, fewer in itertools.pairwise(at_least))

    def as_dict(self) -> dict[str, int | float | Sequence[int] | Sequence[float] | None]:
        """Counts and derived figures by their names, for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "acceptance_length": self.acceptance_length,
            "draft_tokens_per_step": self.draft_tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "per_position_rates": list(self.per_position_rates),
            "accepted_histogram": list(self.accepted_histogram),
        }


def mean_acceptance_length(requests: Iterable[SpecCounts]) -> float | None:
    """The mean of each request's acceptance length, over the requests that had drafts; None where none had.

    Published figures are this mean (the DFlash authors' `benchmark.py`, vLLM's `test_dflash_acceptance_rates`): a long
    answer weighs as much as a short one. `SpecCounts.total(requests).acceptance_length` weighs them by their steps.
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
