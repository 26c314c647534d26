"""What a scenario is made of: questions, shots, traffic and phases. Read by everything else in this package.

A *question* is a prompt with its sampling parameters, and has one right answer. A *shot* is one request that asks it;
the same question may be asked many times, under different cache salts. *Traffic* says who shoots when: in a closed
loop each of N users waits for its answer before the next shot; in an open loop shots leave at their times, whatever the
server does. A *phase* is traffic for a number of seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from load_tests.recording import Recorder
    from load_tests.result import RunResult
    from load_tests.verdict import Bound

Protocol = Literal["grpc", "http"]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how it is to be answered. With a `parent` the whole prompt is that question's prompt, its right
    answer and then `text`: a conversation that has gone on."""

    id: str
    text: str
    max_tokens: int
    parent: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None

    def sampling(self) -> dict[str, int | float | bool]:
        """The sampling parameters as they are sent, without the salt."""
        parameters: dict[str, int | float | bool] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            parameters["ignore_eos"] = True
        if self.seed is not None:
            parameters["seed"] = self.seed
        return parameters


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to be sent. `cancel_after`: give up after so many responses; None: read to the end. `until_s`: give
    up so many seconds after the run began. `tenant` is the request's."""

    question: str
    salt: str = ""
    cancel_after: int | None = None
    until_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """`users` users, each of which shoots again when its answer has come. `shots` makes the shots of a user."""

    name: str
    users: int
    shots: Callable[[int], Iterator[Shot]]


@dataclass(frozen=True, slots=True)
class Open:
    """Shots that leave at given times, whatever the server does. `arrivals` gives the times in seconds since the phase
    began, never falling; it is asked when the phase begins and may look at what was recorded before."""

    name: str
    arrivals: Callable[[Recorder], Iterator[float]]
    shots: Iterator[Shot]


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic for `seconds`. What is sent in the first `warmup_s` is checked but left out of times and rates."""

    name: str
    seconds: float
    traffic: tuple[Closed | Open, ...]
    warmup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, or the scenario's own values."""

    users: int
    duration_s: float
    rate: float
    prompts: int
    seed: int = 0
    protocol: Protocol = "grpc"
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of `Options` where the user chose none. `rate` is in requests a second; 0 where nothing is open-loop
    or the scenario settles it."""

    users: int
    duration_s: float
    prompts: int
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load test. `summary` says what it does in a line, `shows` what its verdict means.

    `settings` are the server's. `compare_at_least` is the least ratio of throughputs with `--compare`, by the setting
    that is changed, as `name=value`.
    """

    name: str
    summary: str
    shows: str
    defaults: Defaults
    settings: Mapping[str, str]
    questions: Callable[[Options], Sequence[Question]]
    phases: Callable[[Options, Sequence[Question]], Sequence[Phase]]
    bounds: Callable[[RunResult], Sequence[Bound]]
    compare_at_least: Mapping[str, float] = field(default_factory=dict)


def deck(items: Sequence[str], rng: Random) -> Iterator[str]:
    """All items in a random order, again and again: any stretch of the sequence holds them evenly, which leaves no
    drift between the beginning and the end of a run but the server's own."""
    while True:
        yield from rng.sample(items, len(items))


def poisson(rate: float, rng: Random) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process with `rate` arrivals a second."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def every(seconds: float) -> Iterator[float]:
    """Arrival times at a steady pace."""
    return itertools.count(seconds, seconds)


def shared(shots: Iterator[Shot]) -> Callable[[int], Iterator[Shot]]:
    """Users that take their shots from one sequence, whoever is next."""
    return lambda user: shots
