"""The controller sends what belongs to the phase that is on, and nothing else."""

from __future__ import annotations

import gevent
import pytest

from load_tests.request_runner import RequestRunner
from load_tests.samples import Recorder, Sample
from load_tests.users import MAX_REQUESTS, SPAWN_RATE, LoadController
from load_tests.workload import ClosedLoop, Phase, Request

REQUEST = Request("question", "salt")
CALM = Phase("calm", 8.0, warmup_s=2.0)
FLOOD = Phase("flood", 8.0, ClosedLoop("flood", 5, lambda user: iter(())))


class Runner(RequestRunner):
    """Answers at once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ended = False

    def run(self, request: Request, sample: Sample) -> None:
        self._recorder.end(sample, "right")

    def end_load(self) -> None:
        self.ended = True


class Clock(Recorder):
    """A recorder whose time is set."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def controller(clock: Clock) -> LoadController:
    made = LoadController([CALM, FLOOD], Runner(clock), clock, "grpc", log=lambda text: None)
    made.tick()
    return made


def test_each_phase_has_its_users_and_its_time(controller: LoadController, clock: Clock) -> None:
    ticks = []
    for clock.at_s in (1.0, 7.0, 8.5, 16.0, 17.0):
        ticks.append(controller.tick())
    assert ticks == [(1, SPAWN_RATE), (1, SPAWN_RATE), (6, SPAWN_RATE), (6, SPAWN_RATE), None]
    assert [(span.name, span.start_s, span.end_s) for span in controller.spans] == [
        ("calm", 0.0, 8.5),
        ("flood", 8.5, 17.0),
    ]
    assert controller.complete


def test_what_is_sent_in_the_warm_up_is_not_measured(controller: LoadController, clock: Clock) -> None:
    for clock.at_s in (1.9, 2.1):
        controller.send(CALM, "probe", REQUEST)
    assert [(sample.outcome, sample.measured) for sample in clock.samples] == [("right", False), ("right", True)]


def test_a_request_of_one_phase_is_not_sent_in_the_next(controller: LoadController, clock: Clock) -> None:
    clock.at_s = 9.0
    controller.tick()
    assert controller.send(CALM, "probe", REQUEST) is None
    assert controller.send(FLOOD, "flood", REQUEST) is not None


def test_nothing_is_sent_after_the_last_phase(controller: LoadController, clock: Clock) -> None:
    """An arrival at the very end: its greenlet runs when the run has begun to wait for what is in flight."""
    late = gevent.spawn(controller.send, CALM, "probe", REQUEST)
    controller.interrupt()
    assert controller.tick() is None
    late.join()
    assert late.value is None
    assert clock.samples == []
    assert not controller.complete


def test_the_end_of_a_phase_wakes_who_waits_in_it(controller: LoadController, clock: Clock) -> None:
    waiter = gevent.spawn(controller.wait_in_phase, CALM, 100.0)
    gevent.sleep(0)
    clock.at_s = 9.0
    controller.tick()
    waiter.join(timeout=5.0)
    assert waiter.value is False
    assert controller.wait_in_phase(FLOOD, 0.0)


def test_the_end_of_the_load_cancels_what_must_not_outlive_it(controller: LoadController, clock: Clock) -> None:
    runner = controller._request_runner
    assert isinstance(runner, Runner)
    for clock.at_s in (8.0, 16.0):
        assert not runner.ended
        controller.tick()
    assert runner.ended


def test_a_run_that_has_sent_as_much_as_any_may_ends(controller: LoadController, clock: Clock) -> None:
    clock.samples = [Sample("calm", "probe", "question", "", True, 0.0)] * MAX_REQUESTS
    assert controller.tick() is None
    assert not controller.complete
