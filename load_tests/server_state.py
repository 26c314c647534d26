"""A server from outside: its metrics page and its processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

T = TypeVar("T")
MODEL = "dflash"
# The end of the names of gauges that are shares, 0 to 1.
SHARE = "_perc"
ROLES = {
    "dflash_backend.engine.process": "engine",
    "dflash_backend.parallel.rank_process": "rank",
    "triton_python_backend_stub": "stub",
    "tritonserver": "server",
}


class MetricsPage:
    """The metrics of one model, from the text of a server's metrics page. Only the lines of a metric that is asked for
    are parsed: all of them take ten times as long as fetching the page."""

    def __init__(self, text: str, model: str = MODEL) -> None:
        self._lines, self._model = text.split("\n"), model

    @classmethod
    def read(cls, address: str, model: str = MODEL) -> MetricsPage:
        """The page as it is now. Raises `httpx.TransportError`."""
        # Without certificates to load, which would take longer than the page.
        return cls(httpx.get(f"http://{address}/metrics", timeout=10, trust_env=False, verify=False).text, model)

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric over the samples with these labels, of a share their mean; 0 for a counter that was never
        counted."""
        return _total(name, [one.value for one in self._named(name) if labels.items() <= one.labels.items()])

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric by the values of one of its labels."""
        values: defaultdict[str, float] = defaultdict(float)
        for sample in self._named(name):
            if label in sample.labels:
                values[sample.labels[label]] += sample.value
        return dict(values)

    def _named(self, name: str) -> list[Sample]:
        # The parser adds `_total` to the names of counters that lack it.
        lines = [line for line in self._lines if line.startswith((name, f"# TYPE {name}"))]
        return [sample for sample in self._parsed(lines) if sample.name in (name, f"{name}_total")]

    def _parsed(self, lines: list[str]) -> list[Sample]:
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        samples = (sample for family in families for sample in family.samples)
        return [sample for sample in samples if sample.labels.get("model") == self._model]

    def totals(self) -> dict[str, float]:
        """All metrics by name, each summed over its labels; of shares, as of several engines, the mean."""
        values: defaultdict[str, list[float]] = defaultdict(list)
        for sample in self._parsed(self._lines):
            values[sample.name].append(sample.value)
        return {name: _total(name, each) for name, each in values.items()}


def _total(name: str, values: Sequence[float]) -> float:
    """The sum of a metric's values, or the mean of a share's."""
    return sum(values) / (max(1, len(values)) if name.endswith(SHARE) else 1)


def processes_by_role(server_pid: int) -> dict[str, list[psutil.Process]]:
    """The processes of a `tritonserver`, itself included, as `server`, `stub`, `engine`, and `rank` for the
    ranks of a shared target that are not the engine."""
    found: defaultdict[str, list[psutil.Process]] = defaultdict(list)
    server = psutil.Process(server_pid)
    for process in (server, *server.children(recursive=True)):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        role = next((role for word, role in ROLES.items() if word in command), None)
        if role is not None:
            found[role].append(process)
    return dict(found)


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Resident memory of those that still run."""
    return sum(_of_each(processes, lambda process: process.memory_info().rss))


def engine_pids(server_pid: int) -> list[int]:
    """The engine processes of a server."""
    return [process.pid for process in processes_by_role(server_pid).get("engine", [])]


def memory_mib(server_pid: int) -> dict[str, float]:
    """Resident memory of a server's processes in MiB, by role."""
    return {role: resident_bytes(processes) / 2**20 for role, processes in processes_by_role(server_pid).items()}


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor time that those that still run have used, without that of their children."""
    return sum(_of_each(processes, lambda process: sum(process.cpu_times()[:2])))


def _of_each(processes: Iterable[psutil.Process], read: Callable[[psutil.Process], T]) -> Iterator[T]:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield read(process)
