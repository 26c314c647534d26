"""What a scenario is made of: questions, requests, closed and open loops, and phases.

A *question* is a prompt with its sampling parameters, and has one right answer. A *request* asks it; the same question
may be asked many times, under different cache salts. In a *closed loop* each of N users waits for its answer before its
next request; in an *open loop* requests leave at their times, whatever the server does. A *phase* runs loops for a
number of seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from load_tests.samples import Sample

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
        """The sampling parameters as they are sent."""
        parameters: dict[str, int | float | bool] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            parameters["ignore_eos"] = True
        if self.seed is not None:
            parameters["seed"] = self.seed
        return parameters


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. `cancel_after`: cancel after this many responses; None: read to the end.
    `cancel_at_end`: cancel when the last phase ends."""

    question: str
    salt: str = ""
    cancel_after: int | None = None
    cancel_at_end: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`users` users that send their next request when the answer to the last one is complete. `requests` yields the
    requests of a user, given its number from 0."""

    name: str
    users: int
    requests: Callable[[int], Iterator[Request]]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that leave at given times. `arrivals` yields the times in seconds since the phase began, in order; it
    is called when the phase begins, with the samples of the phases before."""

    name: str
    arrivals: Callable[[Sequence[Sample]], Iterator[float]]
    requests: Iterator[Request]


@dataclass(frozen=True, slots=True)
class Phase:
    """Loops that run for `seconds`. Requests sent in the first `warmup_s` are checked, but not measured.
    `kills_engine`: an engine of a server that the run has started is killed as the phase begins."""

    name: str
    seconds: float
    closed: ClosedLoop | None = None
    open: OpenLoop | None = None
    warmup_s: float = 0.0
    kills_engine: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. `rate`: open-loop requests a second; 0 where nothing is open-loop, or for the scenario's
    own rate."""

    users: int
    duration_s: float
    prompts: int
    rate: float = 0.0
    seed: int = 0
    protocol: Protocol = "grpc"
    settings: Mapping[str, str] = field(default_factory=dict)


def closed_loop(name: str, options: Options, requests: Iterator[Request], warmup_s: float = 0.0) -> list[Phase]:
    """One phase with one closed loop, whose users take their requests from one sequence."""
    return [Phase("load", options.duration_s, ClosedLoop(name, options.users, shared(requests)), warmup_s=warmup_s)]


def shuffled_cycle(items: Sequence[str], rng: Random) -> Iterator[str]:
    """All items in a random order, again and again. Each stretch of the sequence holds them evenly, so the beginning
    and the end of a run ask the same of the server."""
    while True:
        yield from rng.sample(items, len(items))


def poisson(rate: float, rng: Random) -> Iterator[float]:
    """Arrival times in seconds of a Poisson process with `rate` arrivals a second."""
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def every(seconds: float) -> Iterator[float]:
    """Arrival times at a steady pace."""
    return itertools.count(seconds, seconds)


def shared(requests: Iterator[Request]) -> Callable[[int], Iterator[Request]]:
    """Users that take their requests from one sequence, each the next one."""
    return lambda user: requests
