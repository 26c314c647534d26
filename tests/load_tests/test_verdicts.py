"""Every bound of every scenario is met by a good run and missed by the bad one that it is there for."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from load_tests import bounds
from load_tests.hit_rate import IdealHits
from load_tests.result import HITS, KV_USAGE, QUERIES, RUNNING, WAITING, PhaseSpan
from load_tests.samples import Sample
from load_tests.scenario import Run
from load_tests.scenarios import SCENARIOS, overload
from load_tests.verdict import Bound, verdict
from tests.load_tests.runs import DURATION_S, finished, observation, sample

MISS = {"num_cached_tokens": 0}


def hits_and_misses(hit_s: float = 0.1, miss_s: float = 1.0) -> list[Sample]:
    return [
        sample(at, first_s=at + (miss_s if index % 10 == 0 else hit_s), **(MISS if index % 10 == 0 else {}))
        for index in range(1000)
        for at in [index * 0.04]
    ]


def missed(run: Run) -> list[str]:
    return [bound.name for bound in run.bounds if bound.missed]


def last_observation(**metrics: float) -> list[Any]:
    seen = [observation(float(second)) for second in range(40)]
    return [*seen, observation(40.0, metrics={**seen[-1].metrics, **metrics})]


def test_a_good_run_passes() -> None:
    run = finished(samples=hits_and_misses())
    assert missed(run) == []
    assert run.verdict == "PASS"


@pytest.mark.parametrize(("outcome", "name"), [("error", "errors"), ("refused", "refused requests")])
def test_a_request_that_was_not_answered_fails_the_run(outcome: str, name: str) -> None:
    run = finished(samples=[*hits_and_misses(), sample(39.9, outcome=outcome)])
    assert missed(run) == [name]


def test_a_wrong_answer_fails_the_run() -> None:
    run = finished(samples=hits_and_misses())
    run.result.recorder.num_wrong = 1
    assert missed(run) == ["wrong answers"]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (RUNNING, "requests still running after the end"),
        (WAITING, "requests still waiting after the end"),
        (KV_USAGE, "KV blocks still in use after the end"),
    ],
)
def test_what_is_left_in_the_engine_fails_the_run(metric: str, name: str) -> None:
    assert missed(finished(samples=hits_and_misses(), observations=last_observation(**{metric: 0.5}))) == [name]


def test_a_run_that_nobody_watched_fails() -> None:
    assert "requests still running after the end" in missed(finished(samples=hits_and_misses(), observations=[]))


def test_a_run_without_answers_fails() -> None:
    assert "right answers" in missed(finished(samples=[]))


def test_decaying_acceptance_fails_the_run() -> None:
    samples = hits_and_misses()
    for one in samples[750:]:
        one.num_accepted = 15
    assert missed(finished(samples=samples)) == ["acceptance length of the last quarter, off the first's"]


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


def test_acceptance_of_a_handful_of_answers_is_shown_and_not_judged() -> None:
    samples = hits_and_misses()[::100]
    samples[-1].num_accepted = 0
    drift = bounds.acceptance_drift(finished(samples=samples).result)
    assert not drift.met
    assert not drift.required
    assert drift.line().startswith("not measured: acceptance length of the last quarter, off the first's: ")


def test_a_run_with_a_bound_that_could_not_be_judged_is_incomplete() -> None:
    run = finished(samples=hits_and_misses()[::97])
    assert missed(run) == []
    assert run.verdict == "INCOMPLETE"
    assert not [
        line for line in (bound.line() for bound in run.bounds if not bound.required) if line.startswith("pass")
    ]


def test_a_handful_of_misses_is_not_judged() -> None:
    samples = [sample(index * 0.04, **(MISS if index < 2 else {})) for index in range(1000)]
    bound = bounds.hit_ttft(finished(samples=samples).result)
    assert bound.verdict == "not measured"
    assert "2 misses; at least 10 of each are needed" in bound.line()


def test_what_a_setting_switches_off_is_not_asked_for() -> None:
    off = Bound("a", None, "at most", 1.0, applies=False, note="prefix caching is off")
    assert (off.line(), verdict(True, [off])) == ("not asked: a: prefix caching is off", "PASS")


def test_a_hit_rate_far_from_the_ideal_fails_the_run() -> None:
    run = finished(samples=hits_and_misses(), ideal=IdealHits(1000, 930), ideal_bounded=IdealHits(1000, 930))
    assert missed(run) == ["prefix cache hit rate below the ideal"]


def test_a_hit_rate_below_the_ideal_is_excused_by_a_pool_that_is_too_small() -> None:
    run = finished(samples=hits_and_misses(), ideal=IdealHits(1000, 950), ideal_bounded=IdealHits(1000, 900))
    assert missed(run) == []
    assert "too small" in bounds.hit_rate(run.result).note


def test_a_cache_that_is_on_and_counts_nothing_fails_the_run() -> None:
    empty = [observation(float(at), metrics={QUERIES: 0.0, HITS: 0.0}) for at in range(41)]
    assert bounds.hit_rate(finished(observations=empty).result).verdict == "FAIL (not measured)"


def test_nothing_is_asked_of_a_cache_that_is_off() -> None:
    run = finished(
        samples=hits_and_misses(), settings={"enable_prefix_caching": "false"}, ideal=None, ideal_bounded=None
    )
    assert missed(run) == []


def test_hits_that_are_as_slow_as_misses_fail_the_run() -> None:
    run = finished(samples=hits_and_misses(hit_s=0.3, miss_s=1.0))
    assert missed(run) == ["time to first token, hits over misses (medians)"]


def test_hits_are_only_compared_when_there_are_misses() -> None:
    assert bounds.hit_ttft(finished().result).verdict == "FAIL (not measured)"


def interference(gap_s: float) -> Run:
    alone = [sample(at * 0.1, phase="alone", traffic="streams") for at in range(200)]
    beside = [sample(20 + at * 0.1, phase="with long prompts", traffic="streams") for at in range(200)]
    for one in beside[::20]:
        one.gaps = array("d", [0.05, gap_s, gap_s])
    arriving = [sample(30.0, phase="with long prompts", traffic="long prompts")]
    return finished("interference", [*alone, *beside, *arriving])


def test_streams_that_keep_their_pace_beside_long_prompts_pass() -> None:
    assert missed(interference(gap_s=0.09)) == []


def test_streams_that_stutter_beside_long_prompts_fail() -> None:
    assert missed(interference(gap_s=0.2)) == ["inter-token p99 in 'with long prompts' over 'alone'"]


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


def test_a_tenant_that_is_served_beside_a_flood_passes() -> None:
    assert missed(tenants()) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"polite_s": 0.7}, "median latency of the other tenant beside the flood, over idle"),
        ({"flood_every_s": 1.5}, "goodput of the flood beside the other tenant, over alone"),
        ({"outcome": "cancelled"}, "requests of the other tenant that were answered"),
    ],
)
def test_a_tenant_that_a_flood_holds_up_and_a_flood_that_is_slowed_down_fail(
    changes: dict[str, Any], name: str
) -> None:
    assert missed(tenants(**changes)) == [name]


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


def test_an_overload_that_is_carried_passes() -> None:
    assert missed(overloaded()) == []
    assert overload.recovery_s(overloaded().result) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"goodput": 8.0}, "goodput in overload over its peak"),
        ({"refusal_s": 0.06}, "time to refusal, p99"),
        ({"queue": 97.0}, "longest queue"),
        ({"offered": 15.0}, "offered load over capacity"),
        ({"slow_until_s": 40.0}, "recovery after the load"),
    ],
)
def test_each_bound_of_an_overload_can_be_missed(changes: dict[str, float], name: str) -> None:
    assert missed(overloaded(**changes)) == [name]


def growing(role: str, per_second: int) -> Run:
    seen = [
        observation(
            float(at), rss_bytes={name: (100 << 20) + (at * per_second if name == role else 0) for name in roles}
        )
        for roles in [("stub", "engine", "server")]
        for at in range(41)
    ]
    return finished("soak", observations=seen)


@pytest.mark.parametrize("role", ["stub", "engine", "server"])
def test_memory_that_grows_fails_a_soak(role: str) -> None:
    assert missed(growing(role, per_second=0)) == []
    assert missed(growing(role, per_second=400 << 10)) == [
        f"memory of the {role} in the last third, largest over smallest"
    ]


def test_the_memory_of_a_server_that_is_not_ours_is_not_judged() -> None:
    unseen = [observation(float(at), rss_bytes={}) for at in range(41)]
    assert missed(finished("soak", observations=unseen)) == []


def test_a_slow_answer_fails_a_burst() -> None:
    run = finished("burst", [sample(1.0), sample(2.0, ended_s=9.0)])
    assert missed(run) == ["slowest answer"]


def test_a_cancel_heavy_run_must_have_cancelled_something() -> None:
    assert missed(finished("cancel-heavy")) == ["cancelled requests"]
    cancelled = [sample(1.0), sample(2.0, outcome="cancelled")]
    assert missed(finished("cancel-heavy", cancelled)) == []


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_scenario_fails_on_a_wrong_answer(name: str) -> None:
    run = finished(name)
    run.result.recorder.num_wrong = 1
    assert "wrong answers" in missed(run)


def test_an_interrupted_run_is_neither_passed_nor_failed() -> None:
    assert finished(samples=hits_and_misses(), complete=False).verdict == "INTERRUPTED"


def test_what_was_not_measured_is_missed() -> None:
    assert verdict(True, [Bound("a", None, "at most", 1.0)]) == "FAIL"
    assert verdict(True, [Bound("a", None, "at most", 1.0, required=False)]) == "INCOMPLETE"


def test_quarters_are_of_the_time_that_the_run_took() -> None:
    samples = [sample(at, num_accepted=4 * int(at // (DURATION_S / 4))) for at in (0.0, 9.9, 10.0, 29.9, 30.0, 39.9)]
    assert bounds.acceptance_drift(finished(samples=samples).result).note.startswith(
        "1.000 in the first, 4.000 in the last"
    )
