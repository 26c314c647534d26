"""A defect that the tests must notice."""

from __future__ import annotations

import re
from dataclasses import dataclass

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    """One defect: `before`, which occurs once in `file`, becomes `after`; `tests` (files or single tests) should fail.

    Where `before` begins in the middle of a line, how it is broken into lines does not matter. `more`: further
    replacements of the same defect, as (file, before, after).
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    more: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All replacements."""
        return ((self.file, self.before, self.after), *self.more)


def occurrences(text: str, before: str) -> list[tuple[int, int]]:
    """Where `before` occurs in `text`: as it is, or where it does not, with its white space in another form, as a
    formatter may have left it."""
    found = [(match.start(), match.end()) for match in re.finditer(re.escape(before), text)]
    if found or before != before.strip():
        return found
    words = r"\s+".join(re.escape(word) for word in before.split())
    return [(match.start(), match.end()) for match in re.finditer(words, text)]


def mutants_of(file: str, tests: tuple[str, ...], *defects: Edit) -> tuple[Mutant, ...]:
    """Mutants of one file that the same tests should notice, each as (name, before, after)."""
    return tuple(Mutant(name, file, before, after, tests) for name, before, after in defects)
