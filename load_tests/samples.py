"""What the users saw: one sample for each request, and the wrong answers."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

# right: the whole answer came and is the expected one. wrong: it is another. cancelled: cancelled by the user as
# planned, and right as far as it came. refused: UNAVAILABLE. error: anything else.
Outcome = Literal["right", "wrong", "cancelled", "refused", "error"]
# Wrong answers to keep in full; all of them are counted.
MAX_WRONG_KEPT = 100


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds since the run began: `first_s` and `last_s` of the responses with tokens, `gaps`
    the seconds between those. `measured` is false for requests sent during a warm-up. `status` is an error's."""

    phase: str
    traffic: str
    question: str
    salt: str
    measured: bool
    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    outcome: Outcome = "error"
    status: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    def gap_ends(self) -> Iterator[float]:
        """When each of the gaps ended."""
        first_s = 0.0 if self.first_s is None else self.first_s
        return itertools.islice(itertools.accumulate(self.gaps, initial=first_s), 1, None)

    @property
    def latency_s(self) -> float:
        """Time from sending the request to its end."""
        return self.ended_s - self.sent_s

    @property
    def is_hit(self) -> bool | None:
        """Whether half of the prompt or more came from the prefix cache; None where the server did not say."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return 2 * self.num_cached_tokens >= self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """A wrong answer beside the expected one."""

    at_s: float
    phase: str
    question: str
    salt: str
    prompt: str
    expected_token_ids: list[int]
    got_token_ids: list[int]
    expected_text: str
    got_text: str
    expected_finish_reason: str
    got_finish_reason: str | None


class Recorder:
    """All samples of a run in the order of sending."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.wrong: list[WrongAnswer] = []
        self.num_wrong = 0
        self.in_flight = 0
        self.tokens_by_second: Counter[int] = Counter()
        # The longest time by which the load generator was late in each second: its own share of every latency.
        self.lag_by_second: dict[int, float] = {}
        self._started = time.monotonic()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def begin(self, phase: str, traffic: str, question: str, salt: str, measured: bool) -> Sample:
        """Record a request that is sent now."""
        sample = Sample(phase, traffic, question, salt, measured, self.now())
        self.samples.append(sample)
        self.in_flight += 1
        return sample

    def add_tokens(self, sample: Sample, count: int) -> None:
        """Record a response with `count` new tokens that comes now."""
        now = self.now()
        if sample.last_s is None:
            sample.first_s = now
        else:
            sample.gaps.append(now - sample.last_s)
        sample.last_s = now
        sample.num_tokens += count
        self.tokens_by_second[int(now)] += count

    def end(self, sample: Sample, outcome: Outcome, status: str = "") -> None:
        """Record the end of a request."""
        sample.ended_s, sample.outcome, sample.status = self.now(), outcome, status
        self.in_flight -= 1

    def keep_wrong(self, wrong: WrongAnswer) -> None:
        """Count a wrong answer and keep it if there are not too many."""
        self.num_wrong += 1
        if len(self.wrong) < MAX_WRONG_KEPT:
            self.wrong.append(wrong)

    def add_lag(self, seconds: float) -> None:
        """Record that the load generator woke `seconds` late."""
        second = int(self.now())
        self.lag_by_second[second] = max(self.lag_by_second.get(second, 0.0), seconds)
