"""What must hold of a run, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that must hold. A `measured` of None was not measured, and the bound is missed: a run that shows
    nothing must not pass. With `required` false the bound is shown and does not count; `note` says why."""

    name: str
    measured: float | None
    kind: Literal["at most", "at least"]
    limit: float
    unit: str = ""
    required: bool = True
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether it held."""
        if self.measured is None:
            return False
        return self.measured <= self.limit if self.kind == "at most" else self.measured >= self.limit

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.met:
            return "pass"
        if not self.required:
            return "not required"
        return "FAIL" if self.measured is not None else "FAIL (not measured)"

    def line(self) -> str:
        """The bound as a sentence."""
        measured = "not measured" if self.measured is None else _number(self.measured, self.unit)
        note = f" ({self.note})" if self.note else ""
        return f"{self.verdict}: {self.name}: {measured}, {self.kind} {_number(self.limit, self.unit)}{note}"


def passed(bounds: Iterable[Bound]) -> bool:
    """Whether every bound that is required was met."""
    return all(bound.met or not bound.required for bound in bounds)


def _number(value: float, unit: str) -> str:
    return f"{value:.4g}" + (f" {unit}" if unit else "")
