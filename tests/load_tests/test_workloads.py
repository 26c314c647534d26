"""The scenarios' questions, requests and arrivals: the same for the same seed, and shaped as they say."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest

from load_tests.scenarios import SCENARIOS, burst, cancel_heavy, chat, overload, shared_prefix
from load_tests.workload import Options, Request, poisson, shuffled_cycle
from tests.load_tests.runs import sample

NAMES = sorted(SCENARIOS)


def options(scenario: str, **changes: float) -> Options:
    defaults = SCENARIOS[scenario].defaults
    values = {"users": 4, "duration_s": 30.0, "rate": defaults.rate, "prompts": 24, "seed": 1, **changes}
    return Options(**values)  # type: ignore[arg-type]


def sent(scenario: str, count: int, **changes: float) -> list[tuple[str, str, float, Request]]:
    """(phase, traffic, time or user, request) for the first requests of everybody."""
    chosen = options(scenario, **changes)
    questions = SCENARIOS[scenario].questions(chosen)
    found: list[tuple[str, str, float, Request]] = []
    for phase in SCENARIOS[scenario].phases(chosen, questions):
        if (closed := phase.closed) is not None:
            for user in range(closed.users):
                requests = itertools.islice(closed.requests(user), count)
                found += [(phase.name, closed.name, float(user), request) for request in requests]
        if (opened := phase.open) is not None:
            timed = zip(opened.arrivals([]), opened.requests, strict=False)
            found += [(phase.name, opened.name, at, request) for at, request in itertools.islice(timed, count)]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_questions_and_requests(name: str) -> None:
    questions = SCENARIOS[name].questions(options(name))
    assert SCENARIOS[name].questions(options(name)) == questions
    assert SCENARIOS[name].questions(options(name, seed=2)) != questions
    assert sent(name, 10) == sent(name, 10)


@pytest.mark.parametrize("name", NAMES)
def test_requests_ask_questions_that_exist(name: str) -> None:
    ids = [question.id for question in SCENARIOS[name].questions(options(name))]
    assert len(ids) == len(set(ids))
    assert {request.question for *_, request in sent(name, 10)} <= set(ids)


@pytest.mark.parametrize("name", NAMES)
def test_phases_fill_the_time_that_was_asked_for(name: str) -> None:
    chosen = options(name)
    phases = SCENARIOS[name].phases(chosen, SCENARIOS[name].questions(chosen))
    assert sum(phase.seconds for phase in phases) == pytest.approx(chosen.duration_s)


def test_a_shuffled_cycle_holds_everything_evenly_in_any_stretch() -> None:
    drawn = list(itertools.islice(shuffled_cycle(["a", "b", "c"], Random(0)), 30))
    assert all(sorted(drawn[start : start + 3]) == ["a", "b", "c"] for start in range(0, 30, 3))


def test_poisson_arrivals_come_at_their_rate() -> None:
    times = list(itertools.islice(poisson(50.0, Random(0)), 20_000))
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.03)


def test_shared_prefix_tenants_never_share_a_salt_and_renew_it_after_its_uses() -> None:
    chosen = options("shared-prefix")
    questions = shared_prefix.questions(chosen)
    requests = list(itertools.islice(shared_prefix.requests(chosen, questions), 20_000))
    uses = Counter(request.salt for request in requests)
    assert max(uses.values()) == shared_prefix.USES_OF_A_SALT
    # In the end there are as many unfinished salts as tenants have system prompts, and as many first ones.
    partial = sum(count < shared_prefix.USES_OF_A_SALT for count in uses.values())
    assert partial <= 2 * shared_prefix.TENANTS * shared_prefix.SYSTEM_PROMPTS
    systems = {(request.salt, request.question.partition("/")[0]) for request in requests}
    assert len(systems) == len(uses), "one salt, one system prompt"


def test_shared_prefix_questions_of_one_system_prompt_begin_alike() -> None:
    questions = shared_prefix.questions(options("shared-prefix"))
    texts = [question.text for question in questions if question.id.startswith("system-0/")]
    common = len(shared_prefix.prompts.TURN_END) and min(len(text) for text in texts)
    prefix = texts[0][: common - 250]
    assert len(prefix) > 4 * shared_prefix.SYSTEM_PROMPT_TOKENS * 0.9
    assert all(text.startswith(prefix) for text in texts)


def test_chat_turns_follow_each_other_and_keep_their_salt() -> None:
    chosen = options("chat")
    questions = {question.id: question for question in chat.questions(chosen)}
    requests = list(itertools.islice(chat.conversations(chosen, list(questions.values()))(0), chat.TURNS * 3))
    for before, now in itertools.pairwise(requests):
        if questions[now.question].parent is not None:
            assert (questions[now.question].parent, now.salt) == (before.question, before.salt)
    assert sum(questions[request.question].parent is None for request in requests) == 3


def test_a_burst_brings_all_its_users_at_once() -> None:
    times = list(itertools.takewhile(lambda at: at < 30, burst.arrivals(options("burst", users=7))))
    counts = Counter(times)
    assert times == sorted(times)
    assert [counts[at] for at in (5.0, 15.0, 25.0)] == [7, 7, 7]


def test_half_of_the_cancel_heavy_requests_are_cancelled() -> None:
    chosen = options("cancel-heavy")
    requests = itertools.islice(cancel_heavy.requests(chosen, cancel_heavy.questions(chosen)), 2000)
    assert sum(request.cancel_after is not None for request in requests) == pytest.approx(1000, abs=80)


def test_overload_arrives_at_three_times_the_capacity_that_was_measured() -> None:
    samples = [
        sample(index * 0.1, phase="capacity", first_s=index * 0.1, ended_s=index * 0.1 + 0.1) for index in range(100)
    ]
    times = list(itertools.islice(overload.overload_arrivals(options("overload"), samples), 5000))
    assert len(times) / times[-1] == pytest.approx(30.0, rel=0.05)


def test_capacity_is_of_the_time_in_which_the_answers_came() -> None:
    """Eight users whose answers take two seconds, with a warm-up of two: four answers a second to the end."""
    samples = [
        sample(at, phase="capacity", ended_s=at + 2.0, measured=at >= 2)
        for at in (0.25 * user + 2.0 * turn for turn in range(6) for user in range(8))
    ]
    assert overload.capacity(samples) == 4.0
    in_flight = [one for one in samples if one.ended_s > 12.0]
    for one in in_flight:
        one.ended_s, one.outcome = 0.0, "error"
    assert len(in_flight) == 7
    assert overload.capacity(samples) == 4.0, "the arrivals go by what the bound goes by"


def test_overload_sends_nothing_when_there_was_no_capacity() -> None:
    assert list(overload.overload_arrivals(options("overload"), [])) == []


def test_open_traffic_gives_its_arrivals_in_order() -> None:
    chosen = options("interference")
    phases = SCENARIOS["interference"].phases(chosen, SCENARIOS["interference"].questions(chosen))
    (arriving,) = [phase.open for phase in phases if phase.open is not None]
    assert list(itertools.islice(arriving.arrivals([]), 3)) == [1.0, 2.0, 3.0]
    salts = [request.salt for request in itertools.islice(arriving.requests, 50)]
    assert len(set(salts)) == 50, "every long prompt must be a miss"
