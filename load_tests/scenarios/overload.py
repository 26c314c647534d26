"""Three times more than the server can do, in an open loop: it must go on at full speed and refuse the rest at once.

Requests are of a size at which the work is the model's: a prompt of some hundred tokens that is in no cache, and an
answer of a paragraph. Load generator, server and engine share the machine, so with tiny requests the refusals of
three times the capacity would be what takes its cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import WAITING, RunResult, percentile, ttfts
from load_tests.samples import Sample
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import (
    ClosedLoop,
    OpenLoop,
    Options,
    Phase,
    Question,
    Request,
    every,
    poisson,
    shared,
    shuffled_cycle,
)

PROMPT_TOKENS = 200
MAX_TOKENS = 128
FACTOR = 3.0
MAX_RATE = 600.0
QUEUE = 64
PROBE_EVERY_S = 0.5
CALM_SHARE, CAPACITY_SHARE, OVERLOAD_SHARE, RECOVERY_SHARE = 0.1, 0.25, 0.45, 0.2
WARMUP_S = 2.0
# A probe is served as before when its first token comes within this many times the calm median, or this many seconds.
RECOVERED_FACTOR = 3.0
RECOVERED_S = 0.1


def questions(options: Options) -> list[Question]:
    """Questions behind a few earlier turns."""
    rng = Random(f"overload {options.seed}")
    return [
        Question(f"overload-{index}", prompts.passage(PROMPT_TOKENS, rng) + question.prompt, MAX_TOKENS)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]


def capacity(samples: Sequence[Sample]) -> float:
    """Right answers a second of the phase `capacity` that came between its first request after the warm-up and its last
    one, whenever they were asked for; 0 when there were none. In a closed loop each request follows an answer, so both
    borders lie behind one, and what comes after the phase changes nothing."""
    asked = [s for s in samples if s.phase == "capacity"]
    sent = [s.sent_s for s in asked if s.measured]
    begin, end = min(sent, default=0.0), max(sent, default=0.0)
    right = sum(s.outcome == "right" and begin < s.ended_s <= end for s in asked)
    return right / (end - begin) if right else 0.0


def overload_arrivals(options: Options, samples: Sequence[Sample]) -> Iterator[float]:
    """Poisson arrivals at `rate`, or at `FACTOR` times the capacity that was measured before."""
    rate = options.rate or min(FACTOR * capacity(samples), MAX_RATE)
    return poisson(rate, Random(f"overload arrivals {options.seed}")) if rate else iter(())


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """Calm, capacity (closed loop), overload (open loop), recovery; probes in the first and the last."""
    ids = [one.id for one in asked]
    order = enumerate(shuffled_cycle(ids, Random(f"overload requests {options.seed}")))
    # Each under a salt of its own, so that its prompt is in no cache.
    requests = (Request(question, salt=f"uncached-{number}") for number, question in order)
    probes = shuffled_cycle(ids, Random(f"overload probes {options.seed}"))
    probe = OpenLoop("probe", lambda samples: every(PROBE_EVERY_S), map(Request, probes))
    loop = ClosedLoop("capacity", options.users, shared(requests))
    total = options.duration_s
    flood = OpenLoop("overload", lambda samples: overload_arrivals(options, samples), requests)
    return [
        Phase("calm", total * CALM_SHARE, open=probe),
        Phase("capacity", total * CAPACITY_SHARE, loop, warmup_s=WARMUP_S),
        Phase("overload", total * OVERLOAD_SHARE, open=flood, warmup_s=WARMUP_S),
        Phase("recovery", total * RECOVERY_SHARE, open=probe),
    ]


def recovery_s(result: RunResult) -> float | None:
    """Seconds from the end of the overload to the first probe from which on all are answered as when it was calm."""
    span = result.span("recovery")
    calm = percentile(ttfts(result.measured("calm")), 0.5)
    probes = result.measured("recovery")
    if span is None or calm is None or not probes:
        return None
    limit = max(RECOVERED_FACTOR * calm, RECOVERED_S)
    slow = [s for s in probes if s.outcome != "right" or s.ttft_s is None or s.ttft_s > limit]
    if probes[-1] in slow:
        return None
    after = slow[-1].sent_s if slow else span.start_s
    return next(s.sent_s for s in probes if s.sent_s > after) - span.start_s


def verdict(result: RunResult) -> list[Bound]:
    """Goodput, the queue's bound, quick refusals, quick recovery."""
    peak, kept = capacity(result.samples), result.goodput("overload")
    sent = result.measured("overload")
    refused = [s.latency_s for s in result.samples if s.outcome == "refused"]
    span = result.span("overload")
    offered = len(sent) / (span.end_s - span.start_s - WARMUP_S) if span and span.end_s - span.start_s > WARMUP_S else 0
    queue = int(result.settings.get("max_queue_size", "1024"))
    return [
        *bounds.answers(result, refusals_allowed=True),
        Bound("offered load over capacity", offered / peak if peak else None, "at least", 2.5, note=f"{offered:.0f}/s"),
        Bound(
            "goodput in overload over its peak",
            kept / peak if kept is not None and peak else None,
            "at least",
            0.9,
            note=f"{kept or 0:.1f} and {peak:.1f} right answers a second",
        ),
        # Requests that are about to run, or that were preempted, also wait, but do not count against the queue.
        Bound("longest queue", result.peak(WAITING), "at most", queue + int(result.settings.get("max_num_seqs", "64"))),
        Bound(
            "time to refusal, p99", _ms(percentile(refused, 0.99)), "at most", 50, "ms", note=f"{len(refused)} refused"
        ),
        Bound("recovery after the load", recovery_s(result), "at most", 10, "s"),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


SCENARIO = Scenario(
    name="overload",
    summary="measures the capacity in a closed loop, then sends three times as much in an open one, then lets go",
    shows="goodput stays at its peak, the queue within its bound, refusals are quick and so is recovery",
    defaults=Options(users=48, duration_s=80, prompts=120),
    settings={"max_num_seqs": "32", "max_model_len": "1024", "max_queue_size": str(QUEUE)},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
