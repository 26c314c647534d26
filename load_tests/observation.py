"""Looks at the server once a second from outside: its metrics page and its processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx
import psutil

from load_tests.samples import Recorder
from load_tests.server_state import MetricsPage, cpu_seconds, processes_by_role, resident_bytes

INTERVAL_S = 1.0
TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the server. `metrics`: the metrics page by name, summed over labels, of shares the mean. `rss_bytes`
    and `cpu_s`: by role (stub, engine, server), and empty for a server that this run did not start. `own_cpu_s`: of the
    load generator; `machine_cpu_s`: of all programs. Counters and CPU times are since each process or the system began.
    """

    at_s: float
    metrics: dict[str, float]
    rss_bytes: dict[str, int]
    cpu_s: dict[str, float]
    own_cpu_s: float
    machine_cpu_s: float = 0.0


class Observer:
    """Observes the server until its greenlets are killed, and how late the load generator itself is."""

    def __init__(self, recorder: Recorder, metrics_address: str, model: str, server_pid: int | None) -> None:
        self.observations: list[Observation] = []
        self._recorder = recorder
        self._address = metrics_address
        self._model = model
        self._processes = {} if server_pid is None else processes_by_role(server_pid)

    def watch(self) -> None:
        """Observe the server once a second, for ever."""
        while True:
            self._observe()
            time.sleep(INTERVAL_S)

    def watch_lag(self) -> None:
        """Record how much later than asked a greenlet wakes up, for ever."""
        while True:
            before = time.monotonic()
            time.sleep(TICK_S)
            self._recorder.add_lag(time.monotonic() - before - TICK_S)

    def _observe(self) -> None:
        """Add an observation, unless the metrics page does not answer."""
        try:
            page = MetricsPage.read(self._address, self._model)
        except httpx.TransportError:
            return
        self.observations.append(
            Observation(
                at_s=self._recorder.now(),
                metrics=page.totals(),
                rss_bytes={role: resident_bytes(processes) for role, processes in self._processes.items()},
                cpu_s={role: cpu_seconds(processes) for role, processes in self._processes.items()},
                own_cpu_s=time.process_time(),
                machine_cpu_s=_machine_cpu_s(),
            )
        )


def _machine_cpu_s() -> float:
    """Seconds that the processors were busy, or were lent to another virtual machine."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait
