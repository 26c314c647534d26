"""The engine's supervisor over a toy engine process: what it does after each kind of death, by a clock of the test."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.client import EngineError, engine_command
from dflash_backend.engine_client.supervisor import LONGEST_DELAY_S, Backoff, EngineLost, EngineSupervisor
from dflash_backend.messages import AbortRequests, GenerationRequest, SamplingParams
from tests.engine_client import toy_process

COMMAND = engine_command("tests.engine_client.toy_process")
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
        self._others = psutil.Process().children()

    def children(self) -> list[int]:
        """Child processes since the test began, those that have ended and were not waited for among them."""
        return [child.pid for child in psutil.Process().children() if child not in self._others]

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

    def send_signal(self, number: int) -> None:
        os.kill(self.supervisor.engine.pid, number)

    def kill(self) -> str:
        """Kill the engine; what the supervisor says of its death."""
        self.send_signal(signal.SIGKILL)
        return self.lose()

    def wait_until_replaced(self) -> None:
        self.turn_until(lambda: self.supervisor.engine is not None)

    def poll(self, seconds: int) -> None:
        """Poll for `seconds` of the clock, once a second."""
        for _ in range(seconds):
            self.clock.now += 1.0
            self.supervisor.receive(20)

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


def test_delays_double_up_to_a_minute_until_an_engine_served_and_are_the_longest_for_an_error_of_the_setup():
    backoff = Backoff()

    def delays(*served: bool) -> list[float]:
        return [backoff.delay_s(served=one, setup_error=False) for one in served]

    assert delays(*[False] * 8) == [1, 2, 4, 8, 16, 32, 60, 60]
    assert delays(True, False, False) == [0, 1, 2]
    assert Backoff().delay_s(served=False, setup_error=True) == 60


def test_an_engine_that_never_starts_is_tried_again_for_ever():
    backoff = Backoff()
    delays = [backoff.delay_s(served=False, setup_error=False) for _ in range(5000)]
    assert set(delays[6:]) == {LONGEST_DELAY_S}


def test_an_engine_that_served_comes_back_at_once(watched):
    watched.begin()
    watched.serve_one()
    first = watched.supervisor.engine
    assert "died (signal 9)" in watched.kill()
    assert watched.supervisor.engine is None
    watched.wait_until_replaced()
    assert watched.supervisor.engine is not first
    assert (watched.supervisor.num_restarts, watched.clock.now) == (1, 0.0)
    watched.serve_one()


def test_an_engine_whose_answer_ended_in_a_stop_string_has_served(watched):
    watched.begin()
    watched.ask(1, max_tokens=10**9)
    watched.supervisor.receive(1000)
    watched.supervisor.send(AbortRequests(["r"], {"r": 1}))
    watched.kill()
    watched.wait_until_replaced()
    assert watched.clock.now == 0.0


def test_an_engine_that_dies_before_it_served_waits_out_its_delay(watched):
    watched.begin("end")
    watched.ask(1)
    watched.lose()
    for _ in range(5):
        watched.supervisor.receive(0)
    assert (watched.supervisor.engine, watched.supervisor.num_restarts) == (None, 0)
    watched.clock.now += 1.0
    watched.wait_until_replaced()
    assert watched.supervisor.num_restarts == 1


def test_deaths_while_loading_are_tried_again_ever_more_seldom(watched):
    watched.begin("live", "die", "die", "end", "live")
    watched.serve_one()
    watched.ask(toy_process.DIE)
    assert "died (exit status 9)" in watched.lose()
    watched.failures(3)
    watched.wait_until_replaced()
    watched.ask(1)
    watched.lose()
    watched.clock.now += LONGEST_DELAY_S
    watched.wait_until_replaced()
    whens = [line.partition("started again ")[2] for line in watched.deaths()]
    assert whens == ["at once", "in 1 s", "in 2 s", "in 4 s"]


def test_a_load_error_at_a_restart_is_said_with_what_to_do_and_tried_again(watched):
    watched.begin("live", "fail", "live")
    watched.serve_one()
    watched.kill()
    line = watched.failures(2)[1]
    assert "the toy cannot load with None; the engine is started again in 60 s; correct the settings" in line
    watched.wait_until_replaced()


def test_an_engine_that_sends_nothing_for_too_long_is_killed_and_replaced(watched):
    watched.begin()
    watched.serve_one()
    hanging = watched.supervisor.engine
    os.kill(hanging.pid, signal.SIGSTOP)
    watched.poll(3)  # what it sent before it was stopped
    with pytest.raises(
        EngineLost, match=r"the engine hangs: it has said nothing for 120 s \(engine_hang_timeout_s\)"
    ) as lost:
        watched.poll(122)
    assert lost.value.engine is hanging
    assert watched.supervisor.silence_s == 0.0
    watched.wait_until_replaced()
    assert watched.children() == [watched.supervisor.engine.pid]
    watched.serve_one()


def test_silence_is_measured_while_the_engine_is_polled_and_ends_with_its_next_message(watched):
    watched.begin()
    watched.send_signal(signal.SIGSTOP)
    watched.supervisor.receive(20)
    watched.clock.now += 3600.0
    watched.supervisor.receive(20)
    assert watched.supervisor.silence_s <= 1.0
    watched.poll(50)
    assert 45 <= watched.supervisor.silence_s <= 51
    watched.send_signal(signal.SIGCONT)
    watched.turn_until(lambda: watched.supervisor.silence_s == 0.0)


def test_without_a_limit_silence_ends_no_engine(watched, monkeypatch):
    config = EngineConfig(engine_hang_timeout_s=0.0)
    monkeypatch.setattr(watched.supervisor, "_config", config)
    watched.begin()
    watched.send_signal(signal.SIGSTOP)
    watched.poll(300)
    watched.send_signal(signal.SIGCONT)
    watched.serve_one()


def test_an_error_in_a_step_is_a_death_with_its_reason(watched):
    watched.begin()
    watched.ask(toy_process.BREAK)
    assert watched.lose() == "the engine stopped: RuntimeError: the toy broke"


def test_a_message_for_an_engine_that_is_gone_is_lost_and_has_no_effect(watched):
    watched.begin()
    gone = watched.supervisor.engine
    watched.kill()
    watched.clock.now += LONGEST_DELAY_S
    watched.wait_until_replaced()
    gone.send(GenerationRequest("late", [1], SamplingParams()))
    gone.wake()
    watched.serve_one()


def test_a_process_that_cannot_be_started_is_tried_again(watched, monkeypatch):
    watched.begin()
    watched.serve_one()
    watched.send_signal(signal.SIGKILL)
    monkeypatch.setattr(watched.supervisor, "_command", ["/nowhere/python"])
    watched.lose()
    before = psutil.Process().num_fds()
    assert "could not be started" in watched.failures(4)[-1]
    assert psutil.Process().num_fds() <= before
    monkeypatch.setattr(watched.supervisor, "_command", COMMAND)
    watched.wait_until_replaced()


@pytest.mark.parametrize("missing", ["tempfile.mkdtemp", "zmq.Context", "zmq.Socket.bind", "os.pipe"])
def test_an_engine_that_cannot_be_prepared_is_tried_again(watched, tmp_path, monkeypatch, missing):
    """As without space for its folder, or without descriptors for its sockets and pipes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watched.begin()
    watched.serve_one()
    watched.kill()
    before = psutil.Process().num_fds()
    error = (zmq.ZMQError if missing.startswith("zmq") else OSError)(errno.EMFILE, "Too many open files")

    def refuse(*arguments: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(missing, refuse)
        watched.failures(3)
    assert all("could not be started: " in line and "Too many open files" in line for line in watched.deaths()[1:])
    assert psutil.Process().num_fds() <= before
    assert list(tmp_path.glob("dflash-*")) == []
    watched.clock.now += LONGEST_DELAY_S
    watched.wait_until_replaced()


def test_restarts_leave_no_descriptor_no_thread_no_folder_and_no_zombie(watched, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watched.begin()

    def die_and_return() -> None:
        watched.serve_one()
        watched.kill()
        watched.wait_until_replaced()

    def held() -> tuple[int, int, int]:
        return psutil.Process().num_fds(), threading.active_count(), psutil.Process().num_threads()

    die_and_return()
    before = held()
    for _ in range(3):
        die_and_return()
    assert held() == before
    assert list(tmp_path.glob("dflash-*")) == []
    assert watched.children() == [watched.supervisor.engine.pid]


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_closing_does_not_wait_for_a_restart(watched, when):
    watched.begin("live", "die")
    watched.serve_one()
    watched.kill()
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
