"""The instructions of a Dockerfile, as Docker reads those that ours has."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

# An option of an instruction, as in `RUN --mount=...`, and a value, as in `ENV NAME=value`.
FLAG = re.compile(r"--(\w[\w-]*)=(\S+)\s+")
ASSIGNMENT = re.compile(r"(\w+)=(\"[^\"]*\"|\S*)")


@dataclass(frozen=True)
class Instruction:
    """`name` in capitals, the options by name, and the rest as it stands, its lines joined."""

    name: str
    flags: dict[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """The words of an instruction in exec form, which is JSON, or else those between spaces."""
        return [str(word) for word in json.loads(self.text)] if self.text.startswith("[") else self.text.split()

    @property
    def assignments(self) -> dict[str, str]:
        """What `ENV` or `ARG` sets. Raises `ValueError` for a form that is not NAME=value."""
        found = {name: value.strip('"') for name, value in ASSIGNMENT.findall(self.text)}
        if not found:
            raise ValueError(f"{self.name} {self.text}: not NAME=value")
        return found


@dataclass
class Stage:
    """What is between one FROM and the next; `name` is empty where it has none."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> Instruction:
        """The instruction that counts, of those that override each other. Raises `IndexError` without one."""
        return [one for one in self.instructions if one.name == name][-1]


def read_dockerfile(path: Path) -> list[Stage]:
    """Its stages, in order; what is before the first FROM is left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    logical = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    stages: list[Stage] = []
    for line in filter(str.strip, logical):
        name, _, rest = line.partition(" ")
        flags, rest = {}, rest.strip()
        while match := FLAG.match(rest):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        if name == "FROM":
            stages.append(Stage(rest.partition(" AS ")[2]))
        elif stages:
            if name == "HEALTHCHECK":
                rest = rest.removeprefix("CMD ")
            stages[-1].instructions.append(Instruction(name, flags, rest))
    return stages
