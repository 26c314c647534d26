"""Makes the load of one run with locust, and watches the server meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gevent
from locust.env import Environment
from locust.html import get_html_report
from locust.stats import CSV_STATS_INTERVAL_SEC, StatsCSVFileWriter, stats_history

from dflash_client import DFlashClient
from load_tests.expected_answers import ExpectedAnswer
from load_tests.observation import Observation, Observer
from load_tests.request_runner import RequestRunner
from load_tests.result import PhaseSpan
from load_tests.samples import Recorder
from load_tests.server_state import engine_pids
from load_tests.users import ClosedLoopUser, LoadController, OpenLoopUser
from load_tests.workload import Phase, Protocol, Question

# How long to wait for requests in flight after the last phase, and after an interruption.
DRAIN_S, INTERRUPTED_DRAIN_S = 30.0, 2.0
# The server updates its gauges a few times a second.
SETTLE_S = 1.5
CSV_PERCENTILES = [0.5, 0.9, 0.95, 0.99]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes. `server_pid` is None for a server that this run did not start."""

    url: str
    metrics_url: str
    protocol: Protocol
    model: str
    server_pid: int | None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Load:
    """What a load left. `duration_s` ends with the last phase; `complete`: no phase was cut short."""

    recorder: Recorder
    observations: list[Observation]
    phases: list[PhaseSpan]
    duration_s: float
    complete: bool


def make_load(
    target: Target,
    phases: Sequence[Phase],
    questions: Sequence[Question],
    expected: Mapping[str, ExpectedAnswer],
    out: Path,
    log: Callable[[str], None],
) -> Load:
    """Run the phases against a server and write locust's reports to `out`. SIGINT and SIGTERM end it early, with what
    there is. The standard library must be patched for gevent."""
    recorder = Recorder()
    with DFlashClient(target.url, target.protocol, target.model, timeout_s=target.timeout_s) as client:
        request_runner = RequestRunner(client, {one.id: one for one in questions}, expected, recorder)
        kill = partial(_kill_engine, target.server_pid, log)
        controller = LoadController(phases, request_runner, recorder, target.protocol, log, kill)
        observer = Observer(recorder, target.metrics_url, target.model, target.server_pid)
        environment = Environment(
            user_classes=[ClosedLoopUser, OpenLoopUser],
            shape_class=controller,
            host=f"{target.protocol}://{target.url}",
            stop_timeout=DRAIN_S,
        )
        # The server is observed to the end, also while the reports are closed.
        with _watched(observer), _reports(environment, out), _interruptible(controller, environment, log):
            runner = environment.runner
            assert runner is not None
            runner.start_shape()
            assert runner.shape_greenlet is not None
            runner.shape_greenlet.get()  # the load and the requests that were in flight at its end
            gevent.sleep(SETTLE_S)
    duration_s = controller.spans[-1].end_s if controller.spans else 0.0
    return Load(recorder, observer.observations, controller.spans, duration_s, controller.complete)


def _kill_engine(server_pid: int | None, log: Callable[[str], None]) -> None:
    """Kill one of the server's engines with SIGKILL."""
    pids = [] if server_pid is None else engine_pids(server_pid)
    if not pids:
        log("no engine is killed: this run has not started the server")
        return
    log(f"killing one of {len(pids)} engines, process {pids[0]}")
    os.kill(pids[0], signal.SIGKILL)


@contextmanager
def _watched(observer: Observer) -> Iterator[None]:
    """Observe the server in the block. Raises what ended an observation before its time."""
    watches = [gevent.spawn(observer.watch), gevent.spawn(observer.watch_lag)]
    try:
        yield
    finally:
        gevent.killall(watches)
    for watch in watches:
        watch.get()


@contextmanager
def _reports(environment: Environment, out: Path) -> Iterator[None]:
    """Write locust's CSV files during the block, and its HTML page after it."""
    runner = environment.create_local_runner()
    csv = StatsCSVFileWriter(environment, CSV_PERCENTILES, str(out / "locust"), full_history=True)
    greenlets = [gevent.spawn(csv), gevent.spawn(stats_history, runner)]
    try:
        yield
    finally:
        runner.quit()
        gevent.sleep(CSV_STATS_INTERVAL_SEC)  # for the last rows
        gevent.killall(greenlets)
        csv.close_files()
        html = get_html_report(environment, show_download_link=False)
        (out / "locust.html").write_text(html, encoding="utf-8")


@contextmanager
def _interruptible(controller: LoadController, environment: Environment, log: Callable[[str], None]) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM in the block end the load; another one raises `KeyboardInterrupt`."""

    def interrupt() -> None:
        log("interrupted: writing what there is; once more to give that up too")
        controller.interrupt()
        environment.stop_timeout = INTERRUPTED_DRAIN_S
        restore()

    def restore() -> None:
        for handler, number in zip(handlers, numbers, strict=True):
            handler.cancel()
            signal.signal(number, signal.default_int_handler)

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [gevent.signal_handler(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        restore()
