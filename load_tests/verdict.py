"""What must hold of a run, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["PASS", "FAIL", "INCOMPLETE", "INTERRUPTED"]


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that must hold. A `measured` of None was not measured, and the bound is missed: a run that shows
    nothing must not pass. With `required` false the run has too little to decide it, as `note` says: it neither
    passes nor fails, and the run as a whole is incomplete. With `applies` false it is not asked of this run at all."""

    name: str
    measured: float | None
    kind: Literal["at most", "at least"]
    limit: float
    unit: str = ""
    required: bool = True
    note: str = ""
    applies: bool = True

    @property
    def met(self) -> bool:
        """Whether it held."""
        if self.measured is None:
            return False
        return self.measured <= self.limit if self.kind == "at most" else self.measured >= self.limit

    @property
    def missed(self) -> bool:
        """Whether it fails the run."""
        return self.applies and self.required and not self.met

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.applies:
            return "not asked"
        if not self.required:
            return "not measured"
        if self.met:
            return "pass"
        return "FAIL" if self.measured is not None else "FAIL (not measured)"

    def line(self) -> str:
        """The bound as a sentence."""
        measured = "not measured" if self.measured is None else _number(self.measured, self.unit)
        note = f" ({self.note})" if self.note else ""
        if self.verdict in ("not measured", "not asked"):
            seen = "" if self.measured is None else f"; seen: {measured}"
            return f"{self.verdict}: {self.name}: {self.note or 'too little to judge it by'}{seen}"
        return f"{self.verdict}: {self.name}: {measured}, {self.kind} {_number(self.limit, self.unit)}{note}"


def verdict(complete: bool, bounds: Sequence[Bound]) -> Verdict:
    """PASS; FAIL; INCOMPLETE where no bound was missed but some could not be decided; INTERRUPTED for a run that did
    not come to its end."""
    if not complete:
        return "INTERRUPTED"
    if any(bound.missed for bound in bounds):
        return "FAIL"
    return "PASS" if all(bound.required or not bound.applies for bound in bounds) else "INCOMPLETE"


def _number(value: float, unit: str) -> str:
    return f"{value:.4g}" + (f" {unit}" if unit else "")
