"""The locust users. Which traffic they make is decided by the stage, which `run` moves from phase to phase.

Users of a closed loop and of an open loop are greenlets that wait for the stage, take shots from its traffic and report
each request to locust, which counts it, charts it and puts it into its HTML and CSV.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import gevent
from gevent.event import Event
from gevent.pool import Group

from load_tests.bridge import Bridge
from load_tests.locust_setup import locust
from load_tests.player import Player
from load_tests.recording import Recorder, Sample
from load_tests.workload import Closed, Open, Phase, Protocol, Shot

# A run never sends more than this, whatever its scenario says.
MAX_REQUESTS = 1_000_000


class AnswerError(Exception):
    """What locust shows for a request that did not get its right answer."""


class Stage:
    """The phase that is on, and the means to send a request. One for a run; all users know it."""

    def __init__(self, bridge: Bridge, player: Player, recorder: Recorder, protocol: Protocol) -> None:
        self._bridge, self._player, self.recorder = bridge, player, recorder
        self.protocol = protocol
        # A number for each closed-loop user, which says whose shots it takes.
        self.user_numbers = itertools.count()
        self._changed = Event()
        self.phase: Phase | None = None
        self.ended = False
        self._started_s = 0.0

    def begin(self, phase: Phase | None) -> None:
        """Let a phase begin; None: nobody sends any more."""
        self.phase = phase
        self.ended = phase is None
        self._started_s = self.recorder.now()
        # Wake everybody who waits for a change, and make the next change one to wait for.
        changed, self._changed = self._changed, Event()
        changed.set()

    @property
    def full(self) -> bool:
        """Whether the run has sent as much as any may."""
        return len(self.recorder.samples) >= MAX_REQUESTS

    def wait_for_change(self) -> None:
        """Wait until the next phase begins."""
        self._changed.wait()

    def pause(self, until_s: float) -> None:
        """Wait until `until_s` seconds after the phase began, or until it is over."""
        left = self._started_s + until_s - self.recorder.now()
        if left > 0:
            self._changed.wait(left)

    def shoot(self, phase: Phase, traffic: str, shot: Shot) -> Sample | None:
        """Send a shot and wait for its end; None when its phase was over before it was sent. So nothing is sent once
        the last phase has ended, when nobody would wait for it any more."""
        if self.full:
            self.begin(None)
        if self.phase is not phase:
            return None
        sent_s = self.recorder.now() - self._started_s
        sample = self.recorder.begin(phase.name, traffic, shot, measured=sent_s >= phase.warmup_s)
        return self._bridge.run(self._player.play(shot, sample))


class LoadUser(locust.User):
    """What both kinds of users share: the stage, and telling locust of a request."""

    abstract = True
    stage: Stage

    def report(self, sample: Sample | None) -> None:
        """Tell locust of a request, if one was sent: all of it, and under its own name the time to the first token."""
        if sample is None:
            return
        error = None
        if sample.outcome not in ("right", "cancelled"):
            error = AnswerError(f"{sample.outcome} {sample.status.partition(':')[0]}".strip())
        self._fire(sample.traffic, sample.ended_s - sample.sent_s, sample.num_tokens, error)
        if sample.ttft_s is not None:
            self._fire(f"{sample.traffic}: first token", sample.ttft_s, 1, None)

    def _fire(self, name: str, seconds: float, length: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type=self.stage.protocol,
            name=name,
            response_time=seconds * 1000,
            response_length=length,
            exception=error,
            context={},
            start_time=time.time() - seconds,
        )


class ClosedLoopUser(LoadUser):
    """One of N users: shoots, waits for the answer, shoots again."""

    def on_start(self) -> None:
        """Take a number."""
        self.number = next(self.stage.user_numbers)

    @locust.task
    def take_part(self) -> None:
        """Make the traffic of one phase."""
        phase = self.stage.phase
        share = None if phase is None else _share(phase, self.number)
        if phase is None or share is None:
            self.stage.wait_for_change()
            return
        traffic, shots = share
        while self.stage.phase is phase:
            shot = next(shots, None)
            if shot is None:
                self.stage.wait_for_change()
                return
            self.report(self.stage.shoot(phase, traffic.name, shot))


class OpenLoopUser(LoadUser):
    """Sends the shots of all open-loop traffic at their times and does not wait for answers."""

    fixed_count = 1

    def on_start(self) -> None:
        """Nothing is in flight yet."""
        self._in_flight = Group()

    def on_stop(self) -> None:
        """Give up what is still in flight; the run has waited for it long enough."""
        self._in_flight.kill()

    @locust.task
    def take_part(self) -> None:
        """Make the traffic of one phase."""
        phase = self.stage.phase
        streams = [] if phase is None else [traffic for traffic in phase.traffic if isinstance(traffic, Open)]
        if phase is not None:
            gevent.joinall([gevent.spawn(self._send, phase, traffic) for traffic in streams])
        if self.stage.phase is phase:
            self.stage.wait_for_change()

    def _send(self, phase: Phase, traffic: Open) -> None:
        for at_s, shot in zip(traffic.arrivals(self.stage.recorder), traffic.shots, strict=False):
            self.stage.pause(at_s)
            if self.stage.phase is not phase:
                return
            self._in_flight.spawn(self._shoot, phase, traffic.name, shot)

    def _shoot(self, phase: Phase, traffic: str, shot: Shot) -> None:
        self.report(self.stage.shoot(phase, traffic, shot))


def closed_users(phase: Phase) -> int:
    """How many closed-loop users a phase needs."""
    return sum(traffic.users for traffic in phase.traffic if isinstance(traffic, Closed))


def _share(phase: Phase, number: int) -> tuple[Closed, Iterator[Shot]] | None:
    """The traffic that user `number` makes in a phase; None: it has a rest."""
    for traffic in phase.traffic:
        if isinstance(traffic, Closed):
            if number < traffic.users:
                return traffic, traffic.shots(number)
            number -= traffic.users
    return None
