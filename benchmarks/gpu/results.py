"""What the parts of the benchmark measure. Times in seconds. Each part writes its results as JSON lines; the driver
reads them back, whole or cut short, and hands them to `report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.floor import Ceilings

DFLASH = "DFlash"
INVARIANT = "DFlash, batch_invariant"
FP8_BOTH = "DFlash, FP8 weights and activations"
MEASURED = "DFlash, measured products"
NO_DRAFT = "k = 0"
SERVING = "DFlash, a server's graphs"
EQUAL = "DFlash, equal lengths"
RAGGED = "DFlash, one row of 32k"
SAMPLED = "DFlash, sampled"
PLAIN_DFLASH = "plain torch, DFlash"
PLAIN = "plain torch, k = 0"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Cycle:
    """A system at one batch and context: means over `num_cycles` cycles.

    context: positions behind each row, the mean over the cycles. phases: device time of each phase, empty where they
    were not told apart. floor: of each phase, for this system's own work. synthetic: whether acceptance was drawn.
    host_s: of a cycle, what the host did not spend waiting for the device.
    """

    shape: str
    system: str
    batch: int
    context: float
    nominal_context: int
    k: int
    num_cycles: int
    cycle_s: float
    tokens_per_s: float
    phases: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    host_s: float | None = None

    @property
    def synthetic(self) -> bool:
        """Whether the number of accepted drafts was drawn and not decided by the models."""
        return self.k > 0

    @property
    def gap_s(self) -> float | None:
        """Time of a cycle in which the device ran none of its phases; None where they were not measured."""
        return max(self.cycle_s - sum(self.phases.values()), 0.0) if self.phases else None

    @property
    def idle_share(self) -> float | None:
        """The gap's share of a cycle."""
        return None if self.gap_s is None else self.gap_s / self.cycle_s

    @property
    def floor_s(self) -> float:
        """The floor of the whole cycle."""
        return sum(self.floor.values())

    def over_floor(self, phase: str) -> float | None:
        """A phase's time over its floor; None where it has none or was not measured."""
        floor = self.floor.get(phase, 0.0)
        return self.phases[phase] / floor if floor > 0 and phase in self.phases else None


@dataclass(frozen=True)
class AttentionRun:
    """The attention of one layer alone: `bytes_per_s` of the KV that it must read and write."""

    shape: str
    backend: str
    name: str
    batch: int
    context: int
    queries: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class StepRun:
    """Steps with prompts: all of one prompt of `tokens`, or one step in which `batch` rows decode beside that many.

    seconds, device_s, host_s: by the wall clock, of the phases, and of the host without its waits. floor_s: the least
    that the device can take."""

    shape: str
    name: str
    batch: int
    tokens: int
    seconds: float
    device_s: float
    host_s: float
    floor_s: float


@dataclass(frozen=True)
class PromptAttention:
    """The attention of one layer for `tokens` of a prompt that follow `behind` others, by a system. difference: the
    largest one of its numbers from ours; None where it was not looked at."""

    shape: str
    system: str
    tokens: int
    seconds: float
    flops_per_s: float
    behind: int = 0
    difference: float | None = None


@dataclass(frozen=True)
class StartRun:
    """What a server does before its first request: kernels compiled and padded steps captured. cached: whether Triton
    had compiled kernels before. process_s: since the process began; memory_bytes: of the device, for it."""

    shape: str
    seconds: float
    num_graphs: int
    cached: bool
    process_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class SamplingRun:
    """From logits `[rows, vocab]` to probabilities, with `filters`: by what serves, and by the torch form."""

    shape: str
    filters: str
    rows: int
    vocab: int
    seconds: float
    torch_seconds: float


@dataclass(frozen=True)
class KernelTime:
    """A kernel in the profile of a cycle: how often it ran in one, and its time there in all."""

    shape: str
    batch: int
    context: int
    k: int
    kernel: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Fact:
    """Something about the machine, its packages or a kernel, in words."""

    name: str
    value: str


@dataclass(frozen=True)
class TextRun:
    """What an engine answered, started in a `way`, to requests of one kind: token ids of each."""

    way: str
    requests: str
    answers: list[list[int]]


@dataclass(frozen=True)
class CheckRun:
    """How a test ended: "passed", "failed" or "skipped", and of "all" what pytest says. reason: why it did not pass."""

    test: str
    outcome: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class KernelRun:
    """An operation alone, in a graph with others of its kind. floor_s: by its bytes and operations. others: seconds of
    other ways to do the same."""

    section: str
    name: str
    seconds: float
    floor_s: float
    others: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProductRun:
    """A product by quantised weights beside the same by torch in bfloat16. bytes_per_s: of weights that it reads.
    others: seconds of other ways to compute it, by their names."""

    product: str
    weights: str
    tokens: int
    seconds: float
    plain_seconds: float
    bytes_per_s: float
    others: dict[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """How many times as fast as in bfloat16."""
        return self.plain_seconds / self.seconds


@dataclass(frozen=True)
class StepProfile:
    """Kernels of one step, the mean of some: how many, the time in which one ran, and that between two. The profiler's
    own time lies in `wall_s` and in the gaps. longest: kernels that take the most time, with how often one runs in a
    step, and its seconds there in all."""

    name: str
    kernels: float
    wall_s: float
    busy_s: float
    gaps_s: float
    median_gap_s: float
    longest: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class PartRun:
    """How a part ended. compiled: kernels that were compiled meanwhile. reason: None when it ended well."""

    part: str
    seconds: float
    compiled: int
    reason: str | None


@dataclass(frozen=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    reason: str


@dataclass
class Results:
    """Everything of one run. `device` describes the machine, `settings` how it was called."""

    settings: dict[str, Any]
    device: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    cycles: list[Cycle] = field(default_factory=list)
    attention: list[AttentionRun] = field(default_factory=list)
    sampling: list[SamplingRun] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)
    prompts: list[PromptAttention] = field(default_factory=list)
    starts: list[StartRun] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    texts: list[TextRun] = field(default_factory=list)
    checks: list[CheckRun] = field(default_factory=list)
    kernel_runs: list[KernelRun] = field(default_factory=list)
    products: list[ProductRun] = field(default_factory=list)
    profiles: list[StepProfile] = field(default_factory=list)
    parts: list[PartRun] = field(default_factory=list)

    def take(self, lines: str) -> None:
        """Add what a part wrote. A last line that was cut short, by a part that was ended, is left out."""
        for line in lines.splitlines(keepends=True):
            if line.endswith("\n"):
                self.add(json.loads(line))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add one record: `{"kind": ..., ...}`."""
        kind, values = record["kind"], {name: value for name, value in record.items() if name != "kind"}
        if kind == "device":
            self.device = values
        elif kind == "ceilings":
            self.ceilings = Ceilings(**values)
        elif kind in _LISTS:
            of_kind, name = _LISTS[kind]
            getattr(self, name).append(of_kind(**values))
        else:
            raise ValueError(f"a part of the benchmark wrote a record of the unknown kind '{kind}'")

    @property
    def starts_of_servers(self) -> list[StartRun]:
        """Those with all that a server compiles and captures, in a process of their own."""
        return [run for run in self.starts if run.process_s is not None]

    def find(self, shape: str, system: str, batch: int, nominal_context: int) -> Cycle | None:
        """The measurement of a system at a batch and context, if there is one."""
        wanted = (shape, system, batch, nominal_context)
        return next((c for c in self.cycles if (c.shape, c.system, c.batch, c.nominal_context) == wanted), None)


Record = (
    Cycle | AttentionRun | StepRun | PromptAttention | StartRun | SamplingRun | KernelTime | Skipped | Fact | TextRun
    | CheckRun | KernelRun | ProductRun | StepProfile | PartRun
)  # fmt: skip
# The list of `Results` that has the records of a kind.
_LISTS: dict[str, tuple[type[Record], str]] = {
    "cycle": (Cycle, "cycles"),
    "attention": (AttentionRun, "attention"),
    "sampling": (SamplingRun, "sampling"),
    "step": (StepRun, "steps"),
    "prompt": (PromptAttention, "prompts"),
    "start": (StartRun, "starts"),
    "kernel": (KernelTime, "kernels"),
    "skipped": (Skipped, "skipped"),
    "fact": (Fact, "facts"),
    "text": (TextRun, "texts"),
    "check": (CheckRun, "checks"),
    "kernel_run": (KernelRun, "kernel_runs"),
    "product": (ProductRun, "products"),
    "profile": (StepProfile, "profiles"),
    "part": (PartRun, "parts"),
}
_KINDS: dict[type[Record | Ceilings], str] = {Ceilings: "ceilings"} | {
    of_kind: kind for kind, (of_kind, _) in _LISTS.items()
}


class Recorder:
    """Appends a part's records to a file, each flushed at once: a part that is ended leaves what it had measured."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record | Ceilings) -> None:
        """Append a result."""
        self.write_raw(_KINDS[type(record)], asdict(record))

    def write_raw(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record of this kind. Processes may write to one file at a time: a line is one write."""
        line = json.dumps({"kind": kind, **values}) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())
