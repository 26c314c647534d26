"""Makes the load of one run: users, phases, observation. Called by `run`, which has the server and the answers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from dflash_client import AsyncDFlashClient
from load_tests.bridge import Bridge
from load_tests.observation import Observation, Observer
from load_tests.player import Player
from load_tests.recording import Recorder
from load_tests.reference import Expected
from load_tests.result import PhaseSpan
from load_tests.users import ClosedLoopUser, LoadUser, OpenLoopUser, Stage, closed_users
from load_tests.workload import Phase, Protocol, Question

# After load_tests.users, which keeps locust from patching the standard library.
from locust.env import Environment  # isort: skip
from locust.html import get_html_report  # isort: skip
from locust.stats import CSV_STATS_INTERVAL_SEC, StatsCSVFileWriter, stats_history  # isort: skip

DRAIN_S = 30.0
SETTLE_S = 1.5
SAY_EVERY_S = 10.0
CSV_PERCENTILES = [0.5, 0.9, 0.95, 0.99]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes. `server_pid` is that of a server that we started."""

    url: str
    metrics_url: str
    protocol: Protocol
    model: str
    server_pid: int | None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Load:
    """What a load left: the samples, what was seen of the server, when the phases were, and whether all of it ran."""

    recorder: Recorder
    observations: list[Observation]
    phases: list[PhaseSpan]
    duration_s: float
    complete: bool


def make_load(
    target: Target,
    phases: Sequence[Phase],
    questions: Sequence[Question],
    expected: Mapping[str, Expected],
    out: Path,
    say: Callable[[str], None],
) -> Load:
    """Run the phases against a server and write locust's reports to `out`. SIGINT ends it early, with what there is."""
    recorder = Recorder()
    with Bridge() as bridge, _Interrupt(say) as interrupt:

        async def connect() -> AsyncDFlashClient:
            return AsyncDFlashClient(target.url, target.protocol, target.model, timeout_s=target.timeout_s)

        client = bridge.run(connect())
        player = Player(client, {question.id: question for question in questions}, expected, recorder)
        stage = Stage(bridge, player, recorder, target.protocol)
        observer = Observer(recorder, target.metrics_url, target.model, target.server_pid)
        watches = [bridge.start(observer.watch()), bridge.start(observer.watch_lag())]
        try:
            with _Locust(stage, target, max(map(closed_users, phases)), out):
                spans = _play(stage, phases, interrupt, say)
                complete = not interrupt.is_set() and not stage.full
                duration_s = recorder.now()
                _drain(recorder, interrupt)
            gevent.sleep(SETTLE_S)  # the server's gauges are sent a few times a second
            _check_watches(watches)
        finally:
            bridge.run(client.close())
    return Load(recorder, observer.observations, spans, duration_s, complete)


def _play(stage: Stage, phases: Sequence[Phase], interrupt: Event, say: Callable[[str], None]) -> list[PhaseSpan]:
    """Let the phases pass; returns when each was."""
    recorder, spans = stage.recorder, []
    for phase in phases:
        start = recorder.now()
        say(f"phase '{phase.name}', {phase.seconds:.0f} s")
        stage.begin(phase)
        while (left := start + phase.seconds - recorder.now()) > 0 and not interrupt.is_set() and not stage.ended:
            interrupt.wait(min(left, SAY_EVERY_S))
            if recorder.now() < start + phase.seconds:
                say(_progress(recorder))
        spans.append(PhaseSpan(phase.name, start, recorder.now()))
        if interrupt.is_set() or stage.ended:
            break
    stage.begin(None)
    return spans


def _progress(recorder: Recorder) -> str:
    now = recorder.now()
    recent = sum(recorder.tokens_by_second[int(now) - back] for back in range(1, 6)) / 5
    return (
        f"  {now:.0f} s: {len(recorder.samples)} requests, {recorder.in_flight} in flight, {recent:.0f} tokens/s, "
        f"{recorder.num_wrong} wrong"
    )


def _drain(recorder: Recorder, interrupt: Event) -> None:
    """Wait for what is in flight; what is not done by then is cancelled and counts as an error."""
    deadline = recorder.now() + (2.0 if interrupt.is_set() else DRAIN_S)
    while recorder.in_flight and recorder.now() < deadline:
        gevent.sleep(0.05)


def _check_watches(watches: Sequence[Future[Any]]) -> None:
    """Raise what ended an observer, which should have gone on for ever."""
    for watch in watches:
        if watch.done():
            with contextlib.suppress(CancelledError):
                watch.result()


class _Locust:
    """locust's environment around the stage: users while it lasts, HTML and CSV when it ends."""

    def __init__(self, stage: Stage, target: Target, users: int, out: Path) -> None:
        LoadUser.stage = stage
        self._out = out
        self._users = users
        self._environment = Environment(
            user_classes=[ClosedLoopUser, OpenLoopUser], host=f"{target.protocol}://{target.url}", stop_timeout=1
        )
        self._runner = self._environment.create_local_runner()
        self._csv = StatsCSVFileWriter(self._environment, CSV_PERCENTILES, str(out / "locust"), full_history=True)
        self._greenlets: list[gevent.Greenlet] = []

    def __enter__(self) -> None:
        runner = self._runner
        runner.start(self._users + 1, spawn_rate=100)
        self._greenlets = [gevent.spawn(self._csv), gevent.spawn(stats_history, runner)]

    def __exit__(self, *_: object) -> None:
        self._runner.quit()
        gevent.sleep(CSV_STATS_INTERVAL_SEC)  # for the writer's last rows
        gevent.killall(self._greenlets)
        self._csv.close_files()
        html = get_html_report(self._environment, show_download_link=False)
        (self._out / "locust.html").write_text(html, encoding="utf-8")


class _Interrupt:
    """SIGINT as an event; a second one interrupts as usual."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._event = Event()
        self._watcher: Any = None

    def __enter__(self) -> Event:
        self._watcher = gevent.signal_handler(signal.SIGINT, self._interrupted)
        return self._event

    def __exit__(self, *_: object) -> None:
        self._watcher.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupted(self) -> None:
        self._say("interrupted: writing what there is; once more to give that up too")
        self._watcher.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._event.set()
