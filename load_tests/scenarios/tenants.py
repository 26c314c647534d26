"""A tenant with hundreds of long prompts at once beside one with short requests, which must still be served.

The flood's prompts are in no cache. Its requests are always there, most of them in the server's queue, and are
cancelled at the end of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult, percentile
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import ClosedLoop, OpenLoop, Options, Phase, Question, Request, every, shared, shuffled_cycle

LONG_PROMPT_TOKENS = 2900
LONG_PROMPTS = 4
FLOOD_TOKENS = 16
SHORT_TOKENS = 4
IDLE_SHARE, ALONE_SHARE = 0.15, 0.35
WARMUP_S = 2.0
# Hundreds of long prompts are read and tokenised first.
FLOOD_WARMUP_S = 10.0
MAX_SLOWDOWN = 3.0
MIN_GOODPUT = 0.8


def questions(options: Options) -> list[Question]:
    """Short questions with short answers, and long prompts."""
    rng = Random(f"tenants {options.seed}")
    short = [
        Question(f"short-{index}", question.prompt, SHORT_TOKENS, ignore_eos=True)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]
    long_prompts = [
        Question(f"long-{index}", prompts.passage(LONG_PROMPT_TOKENS, rng), FLOOD_TOKENS, ignore_eos=True)
        for index in range(LONG_PROMPTS)
    ]
    return short + long_prompts


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """The short requests alone, the flood alone, both."""
    short = [one.id for one in asked if one.id.startswith("short-")]
    long_prompts = [one.id for one in asked if one.id.startswith("long-")]
    total = options.duration_s
    floods: Iterator[Request] = (
        Request(long_prompts[number % len(long_prompts)], f"flood-{number}", cancel_at_end=True, tenant="flood")
        for number in itertools.count()
    )
    polite = (Request(name, tenant="polite") for name in shuffled_cycle(short, Random(f"tenants short {options.seed}")))
    flood = ClosedLoop("flood", options.users, shared(floods))
    probe = OpenLoop("polite", lambda samples: every(1 / options.rate), polite)
    idle, alone = total * IDLE_SHARE, total * ALONE_SHARE
    return [
        Phase("idle", idle, open=probe, warmup_s=WARMUP_S),
        Phase("flood", alone, flood, warmup_s=FLOOD_WARMUP_S),
        Phase("both", total - idle - alone, flood, probe, warmup_s=WARMUP_S),
    ]


def verdict(result: RunResult) -> list[Bound]:
    """The other tenant's latency and that it is always answered, and the flood's goodput."""
    idle, both = (percentile(_polite_latencies(result, phase), 0.5) for phase in ("idle", "both"))
    beside = result.measured("both", "polite")
    right = sum(one.outcome == "right" for one in beside)
    alone_rate, both_rate = _flood_rate(result, "flood"), _flood_rate(result, "both")
    return [
        *bounds.answers(result),
        Bound(
            "median latency of the other tenant beside the flood, over idle",
            both / idle if idle and both is not None else None,
            "at most",
            MAX_SLOWDOWN,
            note="" if idle is None or both is None else f"{idle * 1e3:.0f} ms and {both * 1e3:.0f} ms",
        ),
        Bound(
            "requests of the other tenant that were answered", right / len(beside) if beside else None, "at least", 1
        ),
        Bound(
            "goodput of the flood beside the other tenant, over alone",
            both_rate / alone_rate if alone_rate and both_rate is not None else None,
            "at least",
            MIN_GOODPUT,
            note=f"{both_rate or 0:.2f} and {alone_rate or 0:.2f} right answers a second",
        ),
    ]


def _polite_latencies(result: RunResult, phase: str) -> list[float]:
    return [sample.latency_s for sample in result.measured(phase, "polite") if sample.outcome == "right"]


def _flood_rate(result: RunResult, phase: str) -> float | None:
    """Right answers a second to the flood in a phase, its first seconds left out."""
    span = result.span(phase)
    if span is None or span.end_s - span.start_s <= FLOOD_WARMUP_S:
        return None
    begin = span.start_s + (FLOOD_WARMUP_S if phase == "flood" else 0.0)
    ended = (one.ended_s for one in result.samples if one.traffic == "flood" and one.outcome == "right")
    return sum(begin <= at < span.end_s for at in ended) / (span.end_s - begin)


SCENARIO = Scenario(
    name="tenants",
    summary="short requests of one tenant, alone and beside 500 long prompts at once of another",
    shows="a tenant that floods the server keeps its throughput, and another one its latency",
    defaults=Options(users=500, duration_s=120, prompts=40, rate=2.0),
    settings={"max_model_len": "4096"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
