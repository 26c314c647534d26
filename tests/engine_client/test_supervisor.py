"""The engine's supervisor over a toy engine process: what it does after each kind of death, by a clock of the test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineError, engine_command
from dflash_backend.engine_client.supervisor import LONGEST_DELAY_S, Backoff, EngineLost, EngineSupervisor
from dflash_backend.messages import AbortRequests, GenerationRequest, SamplingParams
from tests.engine_client import toy_engine

COMMAND = engine_command("tests.engine_client.toy_engine")
WAIT_S = 20.0


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A supervisor, its clock, its log, and the file that says how the starts go."""

    def __init__(self, lives: Path) -> None:
        self.clock, self.log, self._lives = Clock(), [], lives
        logger = SimpleNamespace(info=self.log.append, error=self.log.append)
        self.supervisor = EngineSupervisor(EngineConfig(), logger, COMMAND, self.clock)
        self._others = children()

    def children(self) -> list[int]:
        """Child processes since the test began: others may have left some that live as long as the tests."""
        return [pid for pid in children() if pid not in self._others]

    def begin(self, *lives: str) -> None:
        """Start the first engine; `lives` are how it and those after it go."""
        self._lives.write_text("\n".join(lives), encoding="utf-8")
        self.supervisor.start()
        self.supervisor.wait_until_ready()

    def ask(self, prompt: int, max_tokens: int = 3) -> None:
        request = GenerationRequest("r", [prompt], SamplingParams(max_tokens=max_tokens))
        self.supervisor.send(request)

    def turn_until(self, reached: Callable[[], bool]) -> list:
        outputs: list = []
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < deadline, f"not reached in {WAIT_S} s: {self.log}"
            outputs += self.supervisor.receive(20)
        return outputs

    def lose(self) -> str:
        with pytest.raises(EngineLost) as lost:
            self.turn_until(lambda: False)
        return str(lost.value)

    def serve_one(self) -> None:
        self.ask(1)
        finished = False
        while not finished:
            outputs = self.supervisor.receive(1000)
            finished = any(delta.finish_reason for output in outputs for delta in output.deltas)

    def failures(self, count: int) -> list[str]:
        """What the log says of the next `count` failures, the clock moved on by the longest delay after each."""
        for number in range(1, count + 1):
            self.turn_until(lambda number=number: len(self.deaths()) >= number)
            self.clock.now += LONGEST_DELAY_S
        return self.deaths()

    def deaths(self) -> list[str]:
        return [line for line in self.log if "the engine is started again" in line]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    lives = tmp_path / "lives"
    monkeypatch.setenv("TOY_ENGINE_LIVES", str(lives))
    watched = Watched(lives)
    yield watched
    watched.supervisor.close()


def test_delays_double_up_to_a_minute_for_an_engine_that_never_serves():
    backoff = Backoff()
    delays = [backoff.delay_s(served=False, setup_error=False) for _ in range(8)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_an_engine_that_served_is_started_at_once_and_the_doubling_begins_anew():
    backoff = Backoff()
    for _ in range(5):
        backoff.delay_s(served=False, setup_error=False)
    assert backoff.delay_s(served=True, setup_error=False) == 0
    assert backoff.delay_s(served=False, setup_error=False) == 1


def test_an_error_of_the_setup_waits_for_the_longest_time():
    assert Backoff().delay_s(served=False, setup_error=True) == 60


def test_an_engine_that_served_comes_back_at_once(watched):
    watched.begin()
    watched.serve_one()
    first = watched.supervisor.engine
    os.kill(first.pid, signal.SIGKILL)
    assert "died (signal 9)" in watched.lose()
    assert watched.supervisor.engine is None
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    assert watched.supervisor.engine is not first
    assert (watched.supervisor.num_restarts, watched.clock.now) == (1, 0.0)
    watched.serve_one()


def test_an_engine_whose_answer_ended_in_a_stop_string_has_served(watched):
    watched.begin()
    watched.ask(1, max_tokens=10**9)
    watched.supervisor.receive(1000)
    watched.supervisor.send(AbortRequests(["r"], {"r": 1}))
    os.kill(watched.supervisor.engine.pid, signal.SIGKILL)
    watched.lose()
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    assert watched.clock.now == 0.0


def test_an_engine_that_dies_before_it_served_waits_out_its_delay(watched):
    watched.begin("end")
    watched.ask(1)
    watched.lose()
    for _ in range(5):
        watched.supervisor.receive(0)
    assert (watched.supervisor.engine, watched.supervisor.num_restarts) == (None, 0)
    watched.clock.now += 1.0
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    assert watched.supervisor.num_restarts == 1


def test_deaths_while_loading_are_tried_again_ever_more_seldom(watched):
    watched.begin("live", "die", "die", "end", "live")
    watched.serve_one()
    watched.ask(toy_engine.DIE)
    assert "died (exit status 9)" in watched.lose()
    watched.failures(3)
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    watched.ask(1)
    watched.lose()
    watched.clock.now += LONGEST_DELAY_S
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    whens = [line.partition("started again ")[2] for line in watched.deaths()]
    assert whens == ["at once", "in 1 s", "in 2 s", "in 4 s"]


def test_a_load_error_at_a_restart_is_said_with_what_to_do_and_tried_again(watched):
    watched.begin("live", "fail", "live")
    watched.serve_one()
    os.kill(watched.supervisor.engine.pid, signal.SIGKILL)
    watched.lose()
    line = watched.failures(2)[1]
    assert "the toy cannot load with None; the engine is started again in 60 s; correct the settings" in line
    watched.turn_until(lambda: watched.supervisor.engine is not None)


def poll(watched: Watched, seconds: int) -> None:
    """Poll for `seconds` of the watched clock, once a second."""
    for _ in range(seconds):
        watched.clock.now += 1.0
        watched.supervisor.receive(20)


def test_an_engine_that_sends_nothing_for_too_long_is_killed_and_replaced(watched):
    watched.begin()
    watched.serve_one()
    hanging = watched.supervisor.engine
    os.kill(hanging.pid, signal.SIGSTOP)
    poll(watched, 3)  # what it sent before it was stopped
    with pytest.raises(
        EngineLost, match=r"the engine hangs: it has said nothing for 120 s \(engine_hang_timeout_s\)"
    ) as lost:
        poll(watched, 122)
    assert lost.value.engine is hanging
    assert watched.supervisor.silence_s == 0.0
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    assert watched.children() == [watched.supervisor.engine.pid]
    watched.serve_one()


def test_the_engines_silence_is_measured_and_ends_with_its_next_message(watched):
    watched.begin()
    os.kill(watched.supervisor.engine.pid, signal.SIGSTOP)
    poll(watched, 50)
    assert 45 <= watched.supervisor.silence_s <= 50
    os.kill(watched.supervisor.engine.pid, signal.SIGCONT)
    watched.turn_until(lambda: watched.supervisor.silence_s == 0.0)


def test_time_without_a_poll_is_no_silence(watched):
    watched.begin()
    os.kill(watched.supervisor.engine.pid, signal.SIGSTOP)
    watched.supervisor.receive(20)
    watched.clock.now += 3600.0
    watched.supervisor.receive(20)
    assert watched.supervisor.silence_s <= 1.0
    os.kill(watched.supervisor.engine.pid, signal.SIGCONT)


def test_without_a_limit_silence_ends_no_engine(watched, monkeypatch):
    config = EngineConfig(engine_hang_timeout_s=0.0)
    monkeypatch.setattr(watched.supervisor, "_config", config)
    watched.begin()
    os.kill(watched.supervisor.engine.pid, signal.SIGSTOP)
    poll(watched, 300)
    os.kill(watched.supervisor.engine.pid, signal.SIGCONT)
    watched.serve_one()


def test_an_error_in_a_step_is_a_death_with_its_reason(watched):
    watched.begin()
    watched.ask(toy_engine.BREAK)
    assert watched.lose() == "the engine stopped: RuntimeError: the toy broke"


def test_a_message_for_an_engine_that_is_gone_is_lost_and_has_no_effect(watched):
    watched.begin()
    gone = watched.supervisor.engine
    os.kill(gone.pid, signal.SIGKILL)
    watched.lose()
    watched.clock.now += LONGEST_DELAY_S
    watched.turn_until(lambda: watched.supervisor.engine is not None)
    gone.send(GenerationRequest("late", [1], SamplingParams()))
    gone.wake()
    watched.serve_one()


def test_a_process_that_cannot_be_started_is_tried_again(watched, monkeypatch):
    watched.begin()
    watched.serve_one()
    os.kill(watched.supervisor.engine.pid, signal.SIGKILL)
    monkeypatch.setattr(watched.supervisor, "_command", ["/nowhere/python"])
    watched.lose()
    before = descriptors()
    assert "could not be started" in watched.failures(4)[-1]
    assert descriptors() <= before
    monkeypatch.setattr(watched.supervisor, "_command", COMMAND)
    watched.turn_until(lambda: watched.supervisor.engine is not None)


def test_restarts_leave_no_descriptor_no_thread_no_folder_and_no_zombie(watched, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watched.begin()

    def die_and_return() -> None:
        watched.serve_one()
        os.kill(watched.supervisor.engine.pid, signal.SIGKILL)
        watched.lose()
        watched.turn_until(lambda: watched.supervisor.engine is not None)

    die_and_return()
    before = (descriptors(), threading.active_count(), len(os.listdir("/proc/self/task")))
    for _ in range(3):
        die_and_return()
    assert (descriptors(), threading.active_count(), len(os.listdir("/proc/self/task"))) == before
    assert list(tmp_path.glob("dflash-*")) == []
    assert watched.children() == [watched.supervisor.engine.pid]


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_closing_does_not_wait_for_a_restart(watched, when):
    watched.begin("live", "die")
    watched.serve_one()
    os.kill(watched.supervisor.engine.pid, signal.SIGKILL)
    watched.lose()
    if when == "waiting":
        watched.failures(2)
    else:
        watched.turn_until(lambda: watched.supervisor.num_restarts == 1)
    start = time.monotonic()
    watched.supervisor.close()
    assert time.monotonic() - start < 2.0
    assert watched.children() == []


def test_a_wake_ends_the_wait_for_a_restart(watched):
    watched.begin("end")
    watched.ask(1)
    watched.lose()
    while watched.supervisor._process is not None:
        watched.supervisor.receive(0)
    watched.supervisor.wake()
    start = time.monotonic()
    watched.supervisor.receive(10_000)
    assert time.monotonic() - start < 5.0


def test_a_first_load_that_fails_is_not_tried_again(watched):
    with pytest.raises(EngineError, match="the toy cannot load"):
        watched.begin("fail")
    assert watched.supervisor.engine is None
    assert watched.children() == []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[int]:
    """Child processes of this one, those that have ended and were not waited for among them."""
    found = []
    for task in os.listdir("/proc/self/task"):
        found += map(int, Path(f"/proc/self/task/{task}/children").read_text(encoding="utf-8").split())
    return found
