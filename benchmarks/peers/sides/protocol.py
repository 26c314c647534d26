"""What the benchmark and the process of a system say to each other: a line of JSON each way. Times in seconds.

The process is started with its settings as an argument, says `{"ready": version}` once the model is loaded, and answers
each run of prompts by what `Clock.result` gives. An error is `{"error": text}`. It ends at the end of its input. This
file is read by other interpreters than the project's, so it uses the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

SEED = 1
"""Of all requests that sample."""
Prompts = list[list[int]]
# Prompts, streams and tokens of each answer -> what `Clock.result` gives.
Run = Callable[[Prompts, int, int], dict[str, Any]]


class Clock:
    """When the tokens of each request arrived. A request's first token is timed from `sent`; of tokens that arrive
    together all but the first have waited 0 s for the one before."""

    def __init__(self, num_requests: int) -> None:
        self._sent = [0.0] * num_requests
        self._last: list[float | None] = [None] * num_requests
        self._first_token_s: list[float] = []
        self._gaps_s: list[float] = []
        self._outputs: list[list[int]] = [[] for _ in range(num_requests)]
        self._started = time.perf_counter()

    def sent(self, index: int, now: float | None = None) -> None:
        """A request has been given to the system."""
        self._sent[index] = time.perf_counter() if now is None else now

    def arrived(self, index: int, tokens: list[int], now: float | None = None) -> None:
        """Tokens of a request have come, maybe none."""
        if not tokens:
            return
        at, last = time.perf_counter() if now is None else now, self._last[index]
        if last is None:
            self._first_token_s.append(at - self._sent[index])
        else:
            self._gaps_s.append(at - last)
        self._gaps_s += [0.0] * (len(tokens) - 1)
        self._last[index] = at
        self._outputs[index] += tokens

    def result(self, drafts: tuple[int, int] | None = None, seconds: float | None = None) -> dict[str, Any]:
        """The run so far. drafts: how many blocks of drafts there were and how many drafts were accepted, where the
        system counts both."""
        return {
            "seconds": time.perf_counter() - self._started if seconds is None else seconds,
            "first_token_s": self._first_token_s,
            "gaps_s": self._gaps_s,
            "outputs": self._outputs,
            "drafts": drafts,
        }


def closed_loop(
    prompts: Prompts,
    streams: int,
    add: Callable[[int, list[int]], None],
    step: Callable[[], Iterator[tuple[int, list[int], bool]]],
) -> Clock:
    """Keep `streams` requests in flight in an engine that is stepped from here. step: index, new tokens and whether it
    has ended, of each request that got some."""
    clock = Clock(len(prompts))
    waiting, in_flight = iter(enumerate(prompts)), 0
    while True:
        while in_flight < streams and (following := next(waiting, None)) is not None:
            index, prompt = following
            clock.sent(index)
            add(index, prompt)
            in_flight += 1
        if not in_flight:
            return clock
        for index, tokens, ended in step():
            clock.arrived(index, tokens)
            in_flight -= ended


def serve(load: Callable[[dict[str, Any]], tuple[str, Run]]) -> None:
    """Load the system of the settings in the first argument, and answer the lines of standard input. load: gives the
    system's version and how it runs prompts. What the system prints goes to standard error."""
    with _answers() as answers:
        try:
            version, run = load(json.loads(sys.argv[1]))
            _say(answers, {"ready": version})
            for line in sys.stdin:
                asked = json.loads(line)
                _say(answers, run(asked["prompts"], asked["streams"], asked["max_tokens"]))
        except Exception as error:  # whatever a foreign system raises is what the benchmark says
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            raise


@contextmanager
def _answers() -> Iterator[IO[str]]:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def _say(answers: IO[str], what: dict[str, Any]) -> None:
    print(json.dumps(what), file=answers, flush=True)
