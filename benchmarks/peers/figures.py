"""What runs give: tokens a second, times to the first token and between tokens, ratios of rounds. Times in seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """What is compared: a pair, with some speculation, prompts of a kind, and a number of requests in flight."""

    pair: str
    drafts: str
    prompts: str
    streams: int

    def __str__(self) -> str:
        return f"{self.pair}, drafts {self.drafts}, {self.prompts} prompts, {self.streams} streams"


@dataclass(frozen=True)
class Sample:
    """A run of one system in one cell. gaps_s: times between the tokens of a request; 0 within a step. drafts: how
    many blocks of drafts, and how many drafts were accepted, where both are counted. others: what other processes took
    of all cores meanwhile, 0 to 1."""

    seconds: float
    first_token_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    outputs: tuple[tuple[int, ...], ...]
    drafts: tuple[int, int] | None = None
    others: float = 0.0

    @classmethod
    def of(cls, data: Mapping[str, Any], others: float = 0.0) -> Sample:
        """The sample that a side's answer tells of."""
        return cls(
            seconds=float(data["seconds"]),
            first_token_s=tuple(data["first_token_s"]),
            gaps_s=tuple(data["gaps_s"]),
            outputs=tuple(map(tuple, data["outputs"])),
            drafts=tuple(data["drafts"]) if data["drafts"] else None,
            others=others,
        )

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, the time of the prompts counted."""
        return self.num_tokens / self.seconds

    @property
    def first_token_p50_s(self) -> float:
        """Median over the requests."""
        return statistics.median(self.first_token_s)

    @property
    def gap_p99_s(self) -> float:
        """The 99th percentile of the time between tokens, over all tokens but each request's first."""
        return percentile(self.gaps_s, 0.99)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted drafts / blocks of drafts; None where there were none, or the system does not count them."""
        return None if not self.drafts or not self.drafts[0] else 1 + self.drafts[1] / self.drafts[0]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed (nearest rank); 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def fault(sample: Sample, num_prompts: int, max_tokens: int) -> str | None:
    """What is wrong with a run, if anything: every prompt has `max_tokens` tokens."""
    lengths = sorted(map(len, sample.outputs))
    if lengths != [max_tokens] * num_prompts:
        return (
            f"{len(lengths)} answers of {lengths[:1]} to {lengths[-1:]} tokens; expected {num_prompts} of {max_tokens}"
        )
    return None


@dataclass
class Results:
    """samples: of each cell by system, one a round, None where that system failed. failures: sentences."""

    samples: dict[Cell, dict[str, list[Sample | None]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, cell: Cell, system: str, sample: Sample | None) -> None:
        """A round of a system in a cell."""
        self.samples.setdefault(cell, {}).setdefault(system, []).append(sample)


def median(samples: Sequence[Sample | None], name: str) -> float | None:
    """The median of a figure over rounds; None where there is none."""
    values = [getattr(sample, name) for sample in samples if sample is not None]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratios(ours: Sequence[Sample | None], theirs: Sequence[Sample | None]) -> list[float]:
    """Our tokens a second over theirs, round by round."""
    return [
        one.tokens_per_s / other.tokens_per_s
        for one, other in zip(ours, theirs, strict=False)
        if one is not None and other is not None
    ]


def equal_share(samples: Sequence[Sample | None], reference: Sequence[Sample | None]) -> float | None:
    """The share of prompts whose answers are, token for token, those of the reference, in the first round of both."""
    pair = next(((a, b) for a, b in zip(samples, reference, strict=False) if a is not None and b is not None), None)
    if pair is None:
        return None
    same = [one == other for one, other in zip(pair[0].outputs, pair[1].outputs, strict=True)]
    return sum(same) / len(same)
