"""What is seen of the server from outside, once a second: its metrics page and its processes. Read by `result`."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx

from dflash_cli.launcher.processes import family
from load_tests.recording import Recorder

_LINE = re.compile(r"^(?P<name>[^{\s]+)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)$")
INTERVAL_S = 1.0
TICK_S = 0.02
ROLES = {b"dflash_backend.engine.process": "engine", b"triton_python_backend_stub": "stub", b"tritonserver": "server"}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the server. `metrics` are the values of the page by name, summed over labels; `rss_bytes` and `cpu_s`
    are by role (stub, engine, server), and empty for a server that somebody else started. `own_cpu_s` is that of the
    load generator, `machine_cpu_s` that of all programs and 0 where the system does not say. Counters and CPU times are
    since the beginning of each process, or of the system."""

    at_s: float
    metrics: dict[str, float]
    rss_bytes: dict[str, int]
    cpu_s: dict[str, float]
    own_cpu_s: float
    machine_cpu_s: float = 0.0


def parse_metrics(page: str, model: str) -> dict[str, float]:
    """The values of a model's metrics by name, summed over the other labels."""
    values: defaultdict[str, float] = defaultdict(float)
    for line in page.splitlines():
        match = _LINE.match(line)
        if match and f'model="{model}"' in (match["labels"] or ""):
            values[match["name"]] += float(match["value"])
    return dict(values)


def processes_by_role(server_pid: int) -> dict[str, list[int]]:
    """The ids of a server's processes by what they are."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for process in family(server_pid):
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        role = next((role for word, role in ROLES.items() if word in command), None)
        if role is not None:
            found[role].append(process.pid)
    return dict(found)


class Observer:
    """Looks at the server once a second until cancelled, and at how late the load generator itself is."""

    def __init__(self, recorder: Recorder, metrics_address: str, model: str, server_pid: int | None) -> None:
        self.observations: list[Observation] = []
        self._recorder = recorder
        self._address = metrics_address
        self._model = model
        self._processes = {} if server_pid is None else processes_by_role(server_pid)

    async def watch(self) -> None:
        """Look once a second, for ever."""
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
            while True:
                await self.look(http)
                await asyncio.sleep(INTERVAL_S)

    async def watch_lag(self) -> None:
        """Note how much later than asked this event loop wakes up, for ever."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._recorder.lag(self._recorder.now(), time.monotonic() - before - TICK_S)

    async def look(self, http: httpx.AsyncClient) -> None:
        """Add an observation; none when the metrics page does not answer."""
        try:
            page = (await http.get(f"http://{self._address}/metrics")).text
        except httpx.TransportError:
            return
        self.observations.append(
            Observation(
                at_s=self._recorder.now(),
                metrics=parse_metrics(page, self._model),
                rss_bytes={role: sum(map(_rss_bytes, pids)) for role, pids in self._processes.items()},
                cpu_s={role: sum(map(_cpu_s, pids)) for role, pids in self._processes.items()},
                own_cpu_s=time.process_time(),
                machine_cpu_s=_machine_cpu_s(),
            )
        )


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def _machine_cpu_s() -> float:
    """Seconds that the processors were busy, or were lent to another virtual machine."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / _CLOCK_TICKS
