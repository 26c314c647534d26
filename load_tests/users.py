"""The locust users of closed and open loops, and the locust shape that moves them from phase to phase."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from gevent.event import Event
from gevent.pool import Group
from locust import LoadTestShape, User, task
from locust.exception import StopUser

from load_tests.request_runner import RequestRunner
from load_tests.result import PhaseSpan
from load_tests.samples import Recorder, Sample
from load_tests.workload import Phase, Protocol, Request

# A run never sends more than this, whatever its scenario says.
MAX_REQUESTS = 1_000_000
SPAWN_RATE = 100.0
LOG_EVERY_S = 10.0


class AnswerError(Exception):
    """What locust shows for a request that did not get its right answer."""


class LoadController(LoadTestShape):
    """Says how many users there are, and which phase they are in. locust asks once a second."""

    def __init__(
        self,
        phases: Sequence[Phase],
        request_runner: RequestRunner,
        recorder: Recorder,
        protocol: Protocol,
        log: Callable[[str], None],
        kill_engine: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._kill_engine = kill_engine
        self.recorder, self.protocol = recorder, protocol
        self.phase: Phase | None = None
        self.spans: list[PhaseSpan] = []
        self.complete = True
        self.user_numbers = itertools.count()
        self._request_runner, self._log = request_runner, log
        self._remaining = deque(phases)
        self._phase_changed = Event()
        self._phase_began_s = self._logged_s = 0.0

    def tick(self) -> tuple[int, float] | None:
        """The number of users, one of which sends the open loop's requests; None ends the load."""
        now = self.recorder.now()
        if len(self.recorder.samples) >= MAX_REQUESTS:
            self.interrupt()
        if self.phase is None or now >= self._phase_began_s + self.phase.seconds or not self.complete:
            self._begin_next_phase(now)
        elif now >= self._logged_s + LOG_EVERY_S:
            self._log_progress(now)
        if self.phase is None:
            return None
        return 1 + (self.phase.closed.users if self.phase.closed else 0), SPAWN_RATE

    def interrupt(self) -> None:
        """End the load with the next tick, before its time."""
        self.complete = False
        self._remaining.clear()

    def wait_in_phase(self, phase: Phase, until_s: float | None = None) -> bool:
        """Wait until `until_s` seconds after the phase began, or for its end; returns whether it still goes on."""
        timeout = None if until_s is None else max(0.0, self._phase_began_s + until_s - self.recorder.now())
        if self.phase is phase:
            self._phase_changed.wait(timeout)
        return self.phase is phase

    def send(self, phase: Phase, traffic: str, request: Request) -> Sample | None:
        """Send a request and wait for its end; None when its phase was over before. After the last phase nothing is
        sent, because nothing would wait for the answer."""
        if self.phase is not phase:
            return None
        measured = self.recorder.now() - self._phase_began_s >= phase.warmup_s
        sample = self.recorder.begin(phase.name, traffic, request.question, request.salt, measured)
        self._request_runner.run(request, sample)
        return sample

    def _begin_next_phase(self, now: float) -> None:
        if self.phase is not None:
            self.spans.append(PhaseSpan(self.phase.name, self._phase_began_s, now))
        self.phase = self._remaining.popleft() if self._remaining else None
        self._phase_began_s = self._logged_s = now
        if self.phase is None:
            self._request_runner.end_load()
        else:
            self._log(f"phase '{self.phase.name}', {self.phase.seconds:.0f} s")
            if self.phase.kills_engine:
                self._kill_engine()
        # Wake the users that wait for the change; the next wait is for the next one.
        changed, self._phase_changed = self._phase_changed, Event()
        changed.set()

    def _log_progress(self, now: float) -> None:
        self._logged_s = now
        recorder = self.recorder
        recent = sum(recorder.tokens_by_second[int(now) - back] for back in range(1, 6)) / 5
        self._log(
            f"  {now:.0f} s: {len(recorder.samples)} requests, {recorder.in_flight} in flight, {recent:.0f} tokens/s, "
            f"{recorder.num_wrong} wrong"
        )


class LoadUser(User):
    """A user that sends requests through the controller and reports them to locust."""

    abstract = True

    @property
    def controller(self) -> LoadController:
        """The run's controller, which is locust's shape."""
        shape = self.environment.shape_class
        assert isinstance(shape, LoadController)
        return shape

    def send(self, phase: Phase, traffic: str, request: Request) -> None:
        """Send a request, wait for its end, and report its times to locust."""
        sample = self.controller.send(phase, traffic, request)
        if sample is None:
            return
        error = None
        if sample.outcome not in ("right", "cancelled"):
            error = AnswerError(f"{sample.outcome} {sample.status.partition(':')[0]}".strip())
        self._report(traffic, sample.latency_s, sample.num_tokens, error)
        if sample.ttft_s is not None:
            self._report(f"{traffic}: first token", sample.ttft_s, 1, None)
        if sample.gaps:
            self._report(f"{traffic}: between responses, mean", fmean(sample.gaps), 1, None)

    def _report(self, name: str, seconds: float, length: int, error: Exception | None) -> None:
        self.environment.events.request.fire(
            request_type=self.controller.protocol,
            name=name,
            response_time=seconds * 1000,
            response_length=length,
            exception=error,
            context={},
            start_time=time.time() - seconds,
        )


class ClosedLoopUser(LoadUser):
    """One of the N users of a closed loop."""

    def on_start(self) -> None:
        """Take a number."""
        self._number = next(self.controller.user_numbers)
        self._phase: Phase | None = None
        self._requests: Iterator[Request] = iter(())

    @task
    def send_next(self) -> None:
        """Send the next request of the phase."""
        phase = self.controller.phase
        if phase is None or phase.closed is None:
            raise StopUser
        if phase is not self._phase:
            self._phase, self._requests = phase, phase.closed.requests(self._number)
        self.send(phase, phase.closed.name, next(self._requests))


class OpenLoopUser(LoadUser):
    """Sends the requests of the open loop at their times, and does not wait for answers."""

    fixed_count = 1

    def on_start(self) -> None:
        """Nothing is in flight yet."""
        self._in_flight = Group()

    @task
    def send_phase(self) -> None:
        """Send the requests of a phase. After the last phase wait for what is in flight."""
        phase = self.controller.phase
        if phase is None:
            self._in_flight.join()
            raise StopUser
        if phase.open is not None:
            arrivals = phase.open.arrivals(self.controller.recorder.samples)
            for at_s, request in zip(arrivals, phase.open.requests, strict=False):
                if not self.controller.wait_in_phase(phase, at_s):
                    return
                self._in_flight.spawn(self.send, phase, phase.open.name, request)
        self.controller.wait_in_phase(phase)

    def on_stop(self) -> None:
        """Cancel what has not been answered in time."""
        self._in_flight.kill()
