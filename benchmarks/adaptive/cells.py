"""Runs the systems of a cell side by side: short slices in turn, so that a machine that becomes slower or faster does
so for all of them. Times in seconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.quiet import MOST_OTHERS, OthersWatch
from dflash_backend import LLM
from dflash_backend.messages import GenerationRequest, SamplingParams
from load_tests.prompts import CATEGORIES, load_prompts

DRAFTERS = ("demo", "shifted", "random")
TRAFFIC = {"chat": ("chat",), "math": ("math",), "mixed": CATEGORIES}
MAX_TOKENS = 96
NUM_PROMPTS = 48
# How often a slice that other processes disturbed is run again.
MAX_REPEATS = 3
# Steps before the first slice: what a request and the estimates need to settle.
WARM_UP_STEPS = 40


@dataclass(frozen=True)
class Cell:
    """What is served: with which drafter, to how many streams, behind a context of how many tokens, which prompts."""

    drafter: str
    streams: int
    context: int
    traffic: str

    def __str__(self) -> str:
        return f"{self.drafter} drafter, {self.streams} streams, context {self.context}, {self.traffic}"


def corner_cells() -> list[Cell]:
    """The 24 corners of the grid."""
    return [Cell(*cell) for cell in itertools.product(DRAFTERS, (1, 64), (100, 1500), ("chat", "math"))]


def all_cells() -> list[Cell]:
    """The whole grid."""
    return [Cell(*cell) for cell in itertools.product(DRAFTERS, (1, 8, 32, 64), (100, 1500), TRAFFIC)]


def prompts_of(cell: Cell, llm: LLM) -> list[list[int]]:
    """Held-out prompts of the cell's traffic, behind as many tokens of text as its context asks for; all have the same
    text, which a prefix cache holds."""
    encode = llm.tokenizer.encode
    prompts = [encode(row.prompt) for row in load_prompts(NUM_PROMPTS, TRAFFIC[cell.traffic])]
    filler = itertools.cycle(itertools.chain.from_iterable(encode(row.prompt) for row in load_prompts(60)))
    num_filler = cell.context - MAX_TOKENS // 2 - int(statistics.mean(map(len, prompts)))
    if num_filler < cell.context // 2:
        return prompts  # about as long as they are
    text = list(itertools.islice(filler, num_filler))
    return [text + prompt for prompt in prompts]


class ClosedLoop:
    """Keeps `streams` requests in flight in an engine, between slices too, as if they had been there for long: the text
    that prompts begin with is in the prefix cache, else the first requests would each compute a copy of it and keep
    it, and the first ones end one after the other.

    num_speculative_tokens: that of each request; None: the engine's.
    """

    def __init__(
        self, llm: LLM, prompts: Iterable[Sequence[int]], streams: int, num_speculative_tokens: int | None = None
    ) -> None:
        self._core = llm.engine.core
        self._prompts: Iterator[Sequence[int]] = itertools.cycle(prompts)
        self._numbers = itertools.count()
        self._streams = streams
        self._eos = tuple(llm.tokenizer.eos_token_ids)
        self._k = num_speculative_tokens
        self.temperature = 0.0  # of requests to come
        self._in_flight: set[str] = set()
        self._add(1)
        while self._in_flight:
            self._step()
        for stream in range(streams):
            self._add(-(-MAX_TOKENS * (stream + 1) // streams))

    def _add(self, max_tokens: int) -> None:
        request_id = f"{id(self)}-{next(self._numbers)}"
        prompt = list(next(self._prompts))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=self.temperature, num_speculative_tokens=self._k)
        self._core.add_request(GenerationRequest(request_id, prompt, sampling, self._eos))
        self._in_flight.add(request_id)

    def step(self) -> int:
        """Take a step; the tokens that came of it."""
        while len(self._in_flight) < self._streams:
            self._add(MAX_TOKENS)
        return self._step()

    def _step(self) -> int:
        outputs = self._core.step()
        self._in_flight.difference_update(delta.request_id for delta in outputs.deltas if delta.finish_reason)
        return sum(len(delta.token_ids) for delta in outputs.deltas)

    def slice(self, seconds: float, clock: Callable[[], float]) -> float:
        """Go on for so long; the tokens per second."""
        num_tokens, started = 0, clock()
        while (elapsed := clock() - started) < seconds:
            num_tokens += self.step()
        return num_tokens / elapsed

    def end(self) -> None:
        """Drop what is in flight."""
        self._core.abort(self._in_flight)
        while self._core.has_unfinished():
            self._core.step()


@dataclass
class Rates:
    """Tokens per second of each system in each round.

    num_repeated, num_disturbed: slices that ran again since others took the cores, and those that count all the same,
    since they never ran undisturbed."""

    by_system: dict[str, list[float]] = field(default_factory=dict)
    num_repeated: int = 0
    num_disturbed: int = 0

    def median(self, system: str) -> float:
        """Over the rounds."""
        return statistics.median(self.by_system[system])

    def ratios(self, system: str, others: Sequence[str]) -> list[float]:
        """In each round the rate over that of the one of `others` whose median is highest."""
        fastest = max(others, key=self.median)
        return [one / other for one, other in zip(self.by_system[system], self.by_system[fastest], strict=True)]


def measure_change(
    loops: dict[str, ClosedLoop],
    temperatures: Sequence[float],
    rounds: int,
    seconds: float,
    num_steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Rates]:
    """Run all systems in turn through parts of a day, each with requests of another temperature; a part is measured
    from `num_steps` steps after the change on."""
    parts = []
    for temperature in temperatures:
        for loop in loops.values():
            loop.temperature = temperature
        parts.append(measure(loops, rounds, seconds, clock, num_steps))
    return parts


def measure(
    loops: dict[str, ClosedLoop],
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    num_steps: int = WARM_UP_STEPS,
) -> Rates:
    """Run all systems in turn, `rounds` times, `seconds` of `clock` each, after `num_steps` steps. Where the clock is
    the wall's, a slice in which other processes took more than `MOST_OTHERS` of the machine runs again."""
    rates = Rates({name: [] for name in loops})
    for loop in loops.values():
        for _ in range(num_steps):
            loop.step()
    order = list(loops)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            rates.by_system[name].append(quiet_slice(loops[name], seconds, clock, rates))
    return rates


def quiet_slice(loop: ClosedLoop, seconds: float, clock: Callable[[], float], rates: Rates) -> float:
    """A slice that others left alone, if one of a few does; its tokens per second. Counts into `rates`."""
    for _ in range(MAX_REPEATS):
        watch = OthersWatch()
        rate = loop.slice(seconds, clock)
        if clock is not time.perf_counter or watch.share() <= MOST_OTHERS:
            return rate
        rates.num_repeated += 1
    rates.num_disturbed += 1
    return loop.slice(seconds, clock)
