"""A calm trickle, and every few seconds many requests at once: the queue fills and must empty again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult, percentile
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import OpenLoop, Options, Phase, Question, Request, poisson, shuffled_cycle

EVERY_S = 10.0
MAX_TOKENS = 48
CLEARED_WITHIN_S = 5.0


def questions(options: Options) -> list[Question]:
    """Short questions."""
    rng = Random(f"burst {options.seed}")
    return [
        Question(f"burst-{index}", question.prompt, MAX_TOKENS)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]


def arrivals(options: Options) -> Iterator[float]:
    """Poisson arrivals at `rate`, and `users` at once every `EVERY_S` seconds, the first after half of that."""
    bursts = (EVERY_S * (number + 0.5) for number in itertools.count() for _ in range(options.users))
    return heapq.merge(poisson(options.rate, Random(f"burst arrivals {options.seed}")), bursts)


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One open loop."""
    chosen = shuffled_cycle([one.id for one in asked], Random(f"burst requests {options.seed}"))
    traffic = OpenLoop("burst", lambda samples: arrivals(options), map(Request, chosen))
    return [Phase("load", options.duration_s, open=traffic)]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, and every burst cleared well before the next."""
    slowest = percentile([s.latency_s for s in result.samples if s.outcome == "right"], 1.0)
    return [*bounds.answers(result), Bound("slowest answer", slowest, "at most", CLEARED_WITHIN_S, "s")]


SCENARIO = Scenario(
    name="burst",
    summary="a few requests a second, and USERS at once every 10 seconds, in an open loop",
    shows="a burst beyond max_num_seqs waits in the queue, is answered rightly, and is gone before the next one",
    defaults=Options(users=64, duration_s=60, prompts=120, rate=2.0),
    settings={"kv_write_guard": "true", "max_num_seqs": "16", "max_model_len": "1024"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
