"""Every bound of every scenario is met by a good run and missed by the bad one that it is there for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from load_tests import bounds
from load_tests.hit_rate import IdealHits
from load_tests.result import HITS, KV_USAGE, QUERIES, RUNNING, WAITING, PhaseSpan, RunResult
from load_tests.samples import Sample
from load_tests.scenario import Run
from load_tests.scenarios import SCENARIOS, overload
from load_tests.scenarios import fleet as fleet_scenario
from load_tests.verdict import Bound, verdict
from tests.load_tests.runs import DURATION_S, finished, observation, sample

MISS = {"num_cached_tokens": 0}


def hits_and_misses(hit_s: float = 0.1, miss_s: float = 1.0) -> list[Sample]:
    return [
        sample(at, first_s=at + (miss_s if index % 10 == 0 else hit_s), **(MISS if index % 10 == 0 else {}))
        for index in range(1000)
        for at in [index * 0.04]
    ]


def good(*more: Sample, **changes: Any) -> Run:
    """A run that meets all bounds, apart from `more` samples and `changes` of the result."""
    return finished(samples=[*hits_and_misses(), *more], **changes)


def missed(run: Run) -> list[str]:
    return [bound.name for bound in run.bounds if bound.missed]


def last_observation(**metrics: float) -> list[Any]:
    seen = [observation(float(second)) for second in range(40)]
    return [*seen, observation(40.0, metrics={**seen[-1].metrics, **metrics})]


def with_wrong_answer(run: Run) -> Run:
    run.result.recorder.num_wrong = 1
    return run


def decaying() -> Run:
    """In its last quarter fewer drafts are accepted."""
    samples = hits_and_misses()
    for one in samples[750:]:
        one.num_accepted = 15
    return finished(samples=samples)


def interference(gap_s: float) -> Run:
    alone = [sample(at * 0.1, phase="alone", traffic="streams") for at in range(200)]
    beside = [sample(20 + at * 0.1, phase="with long prompts", traffic="streams") for at in range(200)]
    for one in beside[::20]:
        one.gaps = array("d", [0.05, gap_s, gap_s])
    arriving = [sample(30.0, phase="with long prompts", traffic="long prompts")]
    # Streams of the first phase go on in the second, and stutter there.
    for one in alone[-20:]:
        one.first_s, one.gaps = 20.5, array("d", [gap_s, gap_s, gap_s])
    phases = [PhaseSpan("alone", 0.0, 20.0), PhaseSpan("with long prompts", 20.0, 40.0)]
    return finished("interference", [*alone, *beside, *arriving], phases=phases)


def tenants(polite_s: float = 0.5, flood_every_s: float = 1.1, outcome: str = "right") -> Run:
    idle = [sample(at * 0.5, phase="idle", traffic="polite", ended_s=at * 0.5 + 0.2) for at in range(10)]
    alone = [sample(5.0, phase="flood", traffic="flood", ended_s=15.0 + at) for at in range(5)]
    beside = [
        sample(at, phase="both", traffic="polite", ended_s=at + polite_s) for at in (20 + 0.5 * n for n in range(40))
    ]
    beside[3].outcome = outcome
    both = [sample(20.0, phase="both", traffic="flood", ended_s=20 + at * flood_every_s) for at in range(40)]
    phases = [PhaseSpan("idle", 0.0, 5.0), PhaseSpan("flood", 5.0, 20.0), PhaseSpan("both", 20.0, 40.0)]
    return finished("tenants", [*idle, *alone, *beside, *both], phases=phases)


def overloaded(
    goodput: float = 10.0,
    refusal_s: float = 0.01,
    slow_until_s: float = 31.0,
    queue: float = 60.0,
    offered: float = 30.0,
) -> Run:
    calm = [sample(at * 0.5, phase="calm", traffic="probe") for at in range(8)]
    peak = [sample(4 + at * 0.1, phase="capacity", ended_s=4 + at * 0.1 + 0.1) for at in range(100)]
    served = [sample(14 + at / goodput, phase="overload") for at in range(int(15.5 * goodput))]
    count = int((offered - goodput) * 16)
    refused = [
        sample(14 + at / (offered - goodput), phase="overload", outcome="refused", first_s=None, ended_s=0.0)
        for at in range(count)
    ]
    for one in refused:
        one.ended_s = one.sent_s + refusal_s
    probes = [30 + at * 0.5 for at in range(20)]
    recovery = [
        sample(at, phase="recovery", traffic="probe", first_s=at + (2.0 if at < slow_until_s else 0.1)) for at in probes
    ]
    for one in (*served, *refused):
        one.measured = one.sent_s >= 16
    spans = [("calm", 0, 4), ("capacity", 4, 14), ("overload", 14, 30), ("recovery", 30, 40)]
    seen = [observation(float(at)) for at in range(40)]
    seen.insert(20, observation(20.0, metrics={**seen[19].metrics, WAITING: queue}))
    return finished(
        "overload",
        [*calm, *peak, *served, *refused, *recovery],
        phases=[PhaseSpan(name, float(start), float(end)) for name, start, end in spans],
        observations=seen,
    )


def growing(role: str, per_second: int) -> Run:
    seen = [
        observation(
            float(at), rss_bytes={name: (100 << 20) + (at * per_second if name == role else 0) for name in ROLES}
        )
        for at in range(41)
    ]
    return finished("soak", observations=seen)


ROLES = ("stub", "engine", "server")
UNSEEN = [observation(float(at), rss_bytes={}) for at in range(41)]
NO_CACHE = {"settings": {"enable_prefix_caching": "false"}, "ideal": None, "ideal_bounded": None}
FAR_FROM_IDEAL = {"ideal": IdealHits(1000, 930), "ideal_bounded": IdealHits(1000, 930)}
CANCELLED = [sample(1.0), sample(2.0, outcome="cancelled")]

# Runs, each with the one bound that it misses, or with none.
RUNS: dict[str, tuple[Callable[[], Run], str | None]] = {
    "a good run": (good, None),
    "an error": (lambda: good(sample(39.9, outcome="error")), "errors"),
    "a refusal": (lambda: good(sample(39.9, outcome="refused")), "refused requests"),
    "a wrong answer": (lambda: with_wrong_answer(good()), "wrong answers"),
    "running": (lambda: good(observations=last_observation(**{RUNNING: 0.5})), "requests still running after the end"),
    "waiting": (lambda: good(observations=last_observation(**{WAITING: 0.5})), "requests still waiting after the end"),
    "blocks": (lambda: good(observations=last_observation(**{KV_USAGE: 0.5})), "KV blocks still in use after the end"),
    "decay": (decaying, "acceptance length of the last quarter, off the first's"),
    "few hits": (lambda: good(**FAR_FROM_IDEAL), "prefix cache hit rate below the ideal"),
    "no cache": (lambda: good(**NO_CACHE), None),
    "slow hits": (
        lambda: finished(samples=hits_and_misses(hit_s=0.3, miss_s=1.0)),
        "time to first token, hits over misses (medians)",
    ),
    "streams that keep their pace": (lambda: interference(gap_s=0.09), None),
    "streams that stutter": (lambda: interference(gap_s=0.2), "inter-token p99 in 'with long prompts' over 'alone'"),
    "tenants": (tenants, None),
    "a tenant that waits": (
        lambda: tenants(polite_s=0.7),
        "median latency of the other tenant beside the flood, over idle",
    ),
    "a flood that is slowed down": (
        lambda: tenants(flood_every_s=1.5),
        "goodput of the flood beside the other tenant, over alone",
    ),
    "a tenant that is cancelled": (
        lambda: tenants(outcome="cancelled"),
        "requests of the other tenant that were answered",
    ),
    "overload": (overloaded, None),
    "low goodput": (lambda: overloaded(goodput=8.0), "goodput in overload over its peak"),
    "slow refusals": (lambda: overloaded(refusal_s=0.06), "time to refusal, p99"),
    "a long queue": (lambda: overloaded(queue=97.0), "longest queue"),
    "too little load": (lambda: overloaded(offered=15.0), "offered load over capacity"),
    "slow recovery": (lambda: overloaded(slow_until_s=40.0), "recovery after the load"),
    "a soak": (lambda: growing("stub", per_second=0), None),
    **{
        f"memory of the {role}": (
            lambda role=role: growing(role, per_second=400 << 10),
            f"memory of the {role} in the last third, largest over smallest",
        )
        for role in ROLES
    },
    "memory of a server that is not ours": (lambda: finished("soak", observations=UNSEEN), None),
    "a slow burst": (lambda: finished("burst", [sample(1.0), sample(2.0, ended_s=9.0)]), "slowest answer"),
    "nothing cancelled": (lambda: finished("cancel-heavy"), "cancelled requests"),
    "cancelled": (lambda: finished("cancel-heavy", CANCELLED), None),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_misses_the_bound_that_it_breaks_and_no_other(name: str) -> None:
    make, bound = RUNS[name]
    run = make()
    assert missed(run) == ([] if bound is None else [bound])
    assert run.verdict == "PASS" or name != "a good run"


def test_a_run_without_observations_fails() -> None:
    assert "requests still running after the end" in missed(good(observations=[]))


def test_a_run_without_answers_fails() -> None:
    assert "right answers" in missed(finished(samples=[]))


def test_another_mixture_of_questions_is_no_drift() -> None:
    """A question that accepts little is asked twice as often in the last quarter; each accepts what it did."""
    samples = hits_and_misses()
    for index, one in enumerate(samples):
        if index % (3 if index < 750 else 2) == 0:
            one.question, one.num_accepted = "hard", 2
    run = finished(samples=samples)
    assert bounds.acceptance_drift(run.result).measured == pytest.approx(0.0)
    for one in samples[750:]:
        one.num_accepted -= one.question == "hard"
    assert bounds.acceptance_drift(run.result).verdict == "FAIL"


def test_questions_of_one_quarter_alone_are_not_compared() -> None:
    samples = hits_and_misses()
    for one in samples[:240]:
        one.question = "early"
    drift = bounds.acceptance_drift(finished(samples=samples).result)
    assert not drift.required
    assert "10 answers to the same questions" in drift.note


def test_acceptance_of_a_handful_of_answers_is_shown_and_has_no_verdict() -> None:
    samples = hits_and_misses()[::100]
    samples[-1].num_accepted = 0
    drift = bounds.acceptance_drift(finished(samples=samples).result)
    assert not drift.met
    assert not drift.required
    assert drift.line().startswith("not measured: acceptance length of the last quarter, off the first's: ")


def test_a_run_with_a_bound_that_could_not_be_checked_is_incomplete() -> None:
    run = finished(samples=hits_and_misses()[::97])
    assert missed(run) == []
    assert run.verdict == "INCOMPLETE"
    assert not [
        line for line in (bound.line() for bound in run.bounds if not bound.required) if line.startswith("pass")
    ]


def test_a_handful_of_misses_has_no_verdict() -> None:
    samples = [sample(index * 0.04, **(MISS if index < 2 else {})) for index in range(1000)]
    bound = bounds.hit_ttft(finished(samples=samples).result)
    assert bound.verdict == "not measured"
    assert "2 misses; at least 10 of each are needed" in bound.line()


def test_what_a_setting_switches_off_is_not_asked_for() -> None:
    off = Bound("a", None, "at most", 1.0, applies=False, note="prefix caching is off")
    assert (off.line(), verdict(True, [off])) == ("not asked: a: prefix caching is off", "PASS")


def test_a_hit_rate_below_the_ideal_is_excused_by_a_pool_that_is_too_small() -> None:
    run = good(ideal=IdealHits(1000, 950), ideal_bounded=IdealHits(1000, 900))
    assert missed(run) == []
    assert "too small" in bounds.hit_rate(run.result).note


def test_a_cache_that_is_on_and_counts_nothing_fails_the_run() -> None:
    empty = [observation(float(at), metrics={QUERIES: 0.0, HITS: 0.0}) for at in range(41)]
    assert bounds.hit_rate(finished(observations=empty).result).verdict == "FAIL (not measured)"


def test_hits_are_only_compared_when_there_are_misses() -> None:
    assert bounds.hit_ttft(finished().result).verdict == "FAIL (not measured)"


def test_a_gap_is_of_the_phase_in_which_it_ended() -> None:
    one = sample(1.0, phase="first", first_s=9.5)
    one.gaps = array("d", [0.25, 0.5, 2.0])  # which end at 9.75, 10.25 and 12.25
    phases = [PhaseSpan("first", 0.0, 10.0), PhaseSpan("second", 10.0, 12.0)]
    run = finished(samples=[one, sample(1.0, first_s=None, gaps=array("d"))], phases=phases)
    assert run.result.gaps("first", "traffic") == [0.25]
    assert run.result.gaps("second", "traffic") == [0.5]
    assert run.result.gaps("second", "others") == []


def test_the_time_to_recover_from_an_overload_is_measured() -> None:
    assert overload.recovery_s(overloaded().result) == pytest.approx(1.0)


def fleet(lost: int = 3, lost_at_s: float = 31.0, restarts: float = 1.0, beside: bool = True, **settings: str) -> Run:
    """A fleet of which an engine is killed after 30 s with 12 streams in flight."""
    samples = [sample(10.0 + at * 0.1, num_cached_tokens=90) for at in range(100)]
    status = "INTERNAL: the engine process died (signal 9); the server's log has its last words"
    samples += [
        sample(29.5, ended_s=lost_at_s, outcome="error", status=status)
        if number < lost
        else sample(29.5, ended_s=30.5 + number * 0.1)
        for number in range(12)
    ]
    samples += [sample(30.5 + 4.0 * (not beside), phase=fleet_scenario.KILLED)]
    seen = [
        observation(
            float(at), metrics={**observation(at).metrics, "dflash:engine_restarts_total": restarts * (at > 30)}
        )
        for at in range(41)
    ]
    spans = [PhaseSpan("ramp", 0.0, 10.0), PhaseSpan("load", 10.0, 30.0), PhaseSpan(fleet_scenario.KILLED, 30.0, 40.0)]
    return finished(
        "fleet", samples, observations=seen, phases=spans, settings=dict(SCENARIOS["fleet"].settings) | settings
    )


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (fleet(lost=12), "streams that the killed engine took along, of all in flight"),
        (fleet(lost_at_s=36.0), "the last of them after the kill"),
        (fleet(restarts=0.0), "engines that were started again"),
        (fleet(beside=False), "right answers to requests of the first 2 s after the kill"),
    ],
)
def test_a_fleet_must_lose_only_the_streams_of_the_engine_that_is_killed(run: Run, name: str) -> None:
    assert name in missed(run)
    assert not missed(fleet())


def test_other_errors_than_of_the_killed_engine_fail_a_fleet() -> None:
    run = fleet()
    run.result.samples[-1].outcome = "error"
    assert "errors other than of the killed engine" in missed(run)


def test_a_fleet_is_not_asked_for_a_kill_where_none_was_to_happen() -> None:
    for changed in ({"data_parallel_size": "1"}, {"routing": "round_robin"}):
        assert not missed(fleet(lost=0, restarts=0.0, beside=False, **changed))


def with_hits(num_cached: int) -> RunResult:
    run = fleet()
    for one in run.result.samples:
        one.num_cached_tokens = num_cached
    return run.result


@pytest.mark.parametrize(("one", "blind", "expected"), [(92, 45, [False, False]), (94, 46, [True, True])])
def test_a_fleets_hit_rate_is_held_to_one_engine_and_to_blind_routing(
    one: int, blind: int, expected: list[bool]
) -> None:
    others = [with_hits(one), with_hits(blind)]
    comparisons = SCENARIOS["fleet"].against
    assert [each.compare(with_hits(90), other).missed for each, other in zip(comparisons, others, strict=True)] == (
        expected
    )


def test_the_engine_that_a_fleet_is_compared_with_has_all_of_its_cache() -> None:
    one, blind = (each.settings(SCENARIOS["fleet"].settings) for each in SCENARIOS["fleet"].against)
    assert one == {"data_parallel_size": "1", "kv_cache_gb": "0.136", "max_num_seqs": "32"}
    assert blind == {"routing": "round_robin"}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_scenario_fails_on_a_wrong_answer(name: str) -> None:
    assert "wrong answers" in missed(with_wrong_answer(finished(name)))


def test_an_interrupted_run_is_neither_passed_nor_failed() -> None:
    assert good(complete=False).verdict == "INTERRUPTED"


def test_what_was_not_measured_is_missed() -> None:
    assert verdict(True, [Bound("a", None, "at most", 1.0)]) == "FAIL"
    assert verdict(True, [Bound("a", None, "at most", 1.0, required=False)]) == "INCOMPLETE"


def test_quarters_are_of_the_time_that_the_run_took() -> None:
    samples = [sample(at, num_accepted=4 * int(at // (DURATION_S / 4))) for at in (0.0, 9.9, 10.0, 29.9, 30.0, 39.9)]
    assert bounds.acceptance_drift(finished(samples=samples).result).note.startswith(
        "1.000 in the first, 4.000 in the last"
    )
