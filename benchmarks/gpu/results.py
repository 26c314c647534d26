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
    """The attention of one layer for a whole prompt of `tokens`, by a system."""

    shape: str
    system: str
    tokens: int
    seconds: float
    flops_per_s: float


@dataclass(frozen=True)
class StartRun:
    """What a server does before its first request: kernels compiled and graphs captured. cached: whether Triton had
    compiled kernels before."""

    shape: str
    seconds: float
    num_graphs: int
    cached: bool


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
        elif kind == "cycle":
            self.cycles.append(Cycle(**values))
        elif kind == "attention":
            self.attention.append(AttentionRun(**values))
        elif kind == "sampling":
            self.sampling.append(SamplingRun(**values))
        elif kind == "step":
            self.steps.append(StepRun(**values))
        elif kind == "prompt":
            self.prompts.append(PromptAttention(**values))
        elif kind == "start":
            self.starts.append(StartRun(**values))
        elif kind == "kernel":
            self.kernels.append(KernelTime(**values))
        elif kind == "skipped":
            self.skipped.append(Skipped(**values))
        else:
            raise ValueError(f"a part of the benchmark wrote a record of the unknown kind '{kind}'")

    def find(self, shape: str, system: str, batch: int, nominal_context: int) -> Cycle | None:
        """The measurement of a system at a batch and context, if there is one."""
        wanted = (shape, system, batch, nominal_context)
        return next((c for c in self.cycles if (c.shape, c.system, c.batch, c.nominal_context) == wanted), None)


Record = Ceilings | Cycle | AttentionRun | SamplingRun | StepRun | PromptAttention | StartRun | KernelTime | Skipped
_KINDS: dict[type[Record], str] = {
    Ceilings: "ceilings",
    Cycle: "cycle",
    AttentionRun: "attention",
    SamplingRun: "sampling",
    StepRun: "step",
    PromptAttention: "prompt",
    StartRun: "start",
    KernelTime: "kernel",
    Skipped: "skipped",
}


class Recorder:
    """Appends a part's records to a file, each flushed at once: a part that is ended leaves what it had measured."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record) -> None:
        """Append a result."""
        self.write_raw(_KINDS[type(record)], asdict(record))

    def write_raw(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record of this kind."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
