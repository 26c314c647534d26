"""Four engines behind one model and tenants with prompts of their own, which all caches together hold and none alone.

The run is compared with one engine that has all the cache, and with the same engines chosen blindly, in turn. At the
end one engine is killed: it may take its own streams along, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.samples import Sample
from load_tests.scenario import Comparison, Scenario
from load_tests.verdict import Bound
from load_tests.workload import ClosedLoop, Options, Phase, Question, Request, shared

TENANTS = 32
SYSTEM_PROMPTS = 4
SYSTEM_PROMPT_TOKENS = 500
MAX_TOKENS = 32
ENGINES = 4
# A quarter of the time fills the caches, a quarter goes on after the kill.
RAMP_SHARE, LOAD_SHARE = 0.25, 0.5
LOAD, KILLED = "load", "after the kill"
RESTARTS = "dflash:engine_restarts_total"
# How long a stream may hang after its engine was killed, and the time after it in which the others must answer.
NOTICED_S, BESIDE_S = 5.0, 2.0
MAX_LOST_SHARE = 0.5
MAX_BELOW_ONE, MIN_OVER_BLIND = 3.0, 2.0


def questions(options: Options) -> list[Question]:
    """System prompts times questions."""
    rng = Random(f"fleet {options.seed}")
    asked = prompts.held_out(max(1, options.prompts // SYSTEM_PROMPTS), rng)
    systems = [prompts.passage(SYSTEM_PROMPT_TOKENS, rng) for _ in range(SYSTEM_PROMPTS)]
    return [
        Question(f"system-{number}/{index}", system + question.prompt, MAX_TOKENS)
        for number, system in enumerate(systems)
        for index, question in enumerate(asked)
    ]


def requests(options: Options, asked: Sequence[Question]) -> Iterator[Request]:
    """Any tenant next, each as likely. A tenant has one system prompt, under a salt of its own."""
    rng = Random(f"fleet requests {options.seed}")
    own = [[one.id for one in asked if one.id.startswith(f"system-{number}/")] for number in range(SYSTEM_PROMPTS)]
    while True:
        tenant = rng.randrange(TENANTS)
        yield Request(rng.choice(own[tenant % SYSTEM_PROMPTS]), f"tenant-{tenant}", tenant=f"tenant-{tenant}")


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """A closed loop; in a fleet that does not route blindly an engine is killed before the last part."""
    loop = ClosedLoop("tenants", options.users, shared(requests(options, asked)))
    settings = {**SETTINGS, **options.settings}
    kills = int(settings["data_parallel_size"]) > 1 and settings.get("routing", "prefix") == "prefix"
    ramp_s, load_s = (options.duration_s * share for share in (RAMP_SHARE, LOAD_SHARE))
    return [
        Phase("ramp", ramp_s, loop),
        Phase(LOAD, load_s, loop),
        Phase(KILLED, options.duration_s - ramp_s - load_s, loop, kills_engine=kills),
    ]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, and of a killed engine that it takes only its own streams along."""
    lost = [one for one in result.samples if "engine process died" in one.status]
    others = [bound for bound in bounds.answers(result) if bound.name != "errors"]
    num_other_errors = result.count("error") - sum(one.outcome == "error" for one in lost)
    others.append(Bound("errors other than of the killed engine", num_other_errors, "at most", 0))
    return [*others, *_of_kill(result, lost)]


def _of_kill(result: RunResult, lost: Sequence[Sample]) -> list[Bound]:
    restarts = result.observations[-1].metrics.get(RESTARTS) if result.observations else None
    killed = bool(restarts) and result.span(KILLED) is not None
    at = result.span(KILLED).start_s if killed else 0.0  # type: ignore[union-attr]
    in_flight = [one for one in result.samples if one.sent_s < at <= one.ended_s]
    beside = [one for one in result.samples if at <= one.sent_s < at + BESIDE_S and one.outcome == "right"]
    share = len(lost) / len(in_flight) if in_flight else None
    asked = _is_fleet(result)
    return [
        Bound("engines that were started again", restarts, "at least", 1, applies=asked),
        Bound(
            "streams that the killed engine took along, of all in flight",
            share if killed else None,
            "at most",
            MAX_LOST_SHARE,
            applies=asked,
            note=f"{len(lost)} of {len(in_flight)}",
        ),
        Bound(
            "the last of them after the kill",
            max((one.ended_s - at for one in lost), default=0.0) if killed else None,
            "at most",
            NOTICED_S,
            "s",
            applies=asked,
        ),
        Bound(
            f"right answers to requests of the first {BESIDE_S:g} s after the kill",
            len(beside) if killed else None,
            "at least",
            1,
            applies=asked,
        ),
    ]


def _is_fleet(result: RunResult) -> bool:
    """Whether an engine was to be killed."""
    settings = result.settings
    return int(settings["data_parallel_size"]) > 1 and settings.get("routing", "prefix") == "prefix"


def hit_rate(result: RunResult) -> float | None:
    """The share of prompt tokens that were cached, of the right answers to the requests of the load."""
    samples = [one for one in result.measured(LOAD) if one.outcome == "right" and one.num_cached_tokens is not None]
    asked = sum(one.num_prompt_tokens for one in samples)
    return sum(one.num_cached_tokens or 0 for one in samples) / asked if asked else None


def below_one(fleet: RunResult, one: RunResult) -> Bound:
    """How far the fleet's hit rate is below that of one engine with all the cache, in percent of it."""
    measured, reached = hit_rate(fleet), hit_rate(one)
    below = None if measured is None or not reached else max(0.0, (1 - measured / reached) * 100)
    note = "" if measured is None or reached is None else f"{measured * 100:.1f} % and {reached * 100:.1f} %"
    return Bound(
        "hit rate below that of one engine with all the cache", below, "at most", MAX_BELOW_ONE, "%", note=note
    )


def over_blind(fleet: RunResult, blind: RunResult) -> Bound:
    """The fleet's hit rate over that of the same engines in turn."""
    measured, least = hit_rate(fleet), hit_rate(blind)
    ratio = None if measured is None or not least else measured / least
    note = "" if measured is None or least is None else f"{measured * 100:.1f} % and {least * 100:.1f} %"
    return Bound("hit rate over that of blind routing", ratio, "at least", MIN_OVER_BLIND, note=note)


def _one_engine(settings: Mapping[str, str]) -> dict[str, str]:
    """One engine with the cache, and the rows, of all."""
    num = int(settings["data_parallel_size"])
    return {
        "data_parallel_size": "1",
        "kv_cache_gb": str(float(settings["kv_cache_gb"]) * num),
        "max_num_seqs": str(int(settings["max_num_seqs"]) * num),
    }


SETTINGS = {
    "data_parallel_size": str(ENGINES),
    "kv_write_guard": "true",
    "max_num_seqs": "8",
    "max_model_len": "1024",
    # About 400 blocks, a third of what the tenants' prompts take.
    "kv_cache_gb": "0.034",
    "num_speculative_tokens": "3",
}
SCENARIO = Scenario(
    name="fleet",
    summary="four engines, 32 tenants with their own prompts, an engine that is killed; against one and blind routing",
    shows="requests find their prefix as in one large cache, and a killed engine takes only its own streams along",
    defaults=Options(users=12, duration_s=120, prompts=32),
    settings=SETTINGS,
    questions=questions,
    phases=phases,
    bounds=verdict,
    against=(
        Comparison("one-engine", _one_engine, below_one),
        Comparison("blind", lambda settings: {"routing": "round_robin"}, over_blind),
    ),
)
