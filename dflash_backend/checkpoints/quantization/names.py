"""Which projections a quantisation config means by its lists of names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.error_text import shown

PATTERN = "re:"
# Every projection is of this class.
LINEAR = "Linear"
# A checkpoint comes from elsewhere, and a pattern of nested repeats could take years. Within these bounds one is quick.
MAX_PATTERN_CHARS, MAX_REPEATS, MAX_ALTERNATIVES = 2000, 5, 10_000
REPEAT = re.compile(r"(?<![\\(])[*+?{]")
REPEATED_GROUP = re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class Names:
    """Projections by name: `names` as they are, `patterns` that match from a name's beginning, and with `all` every
    one. parts: a name of the list also means what lies in that module, and a name that ends so."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    all: bool = False
    parts: bool = field(default=False, kw_only=True)

    def __contains__(self, projection: str) -> bool:
        if self.all or projection in self.names or any(pattern.match(projection) for pattern in self.patterns):
            return True
        return self.parts and any(
            projection.startswith(f"{name}.") or projection.endswith(f".{name}") for name in self.names
        )


def read_names(config: JsonReader, name: str, *, parts: bool = False) -> Names:
    """The list `name` of a config; nothing where it is missing. Raises `CheckpointError`."""
    return make_names(config, name, config.strings(name), parts=parts)


def make_names(config: JsonReader, name: str, entries: Sequence[str], *, parts: bool = False) -> Names:
    """`entries` of the list `name`. Raises `CheckpointError` on a pattern that cannot be used."""
    patterns = [_compile(config, name, entry) for entry in entries if entry.startswith(PATTERN)]
    names = frozenset(entry for entry in entries if not entry.startswith(PATTERN))
    return Names(names, tuple(patterns), LINEAR in names, parts=parts)


def _compile(config: JsonReader, name: str, entry: str) -> re.Pattern[str]:
    text = entry.removeprefix(PATTERN)
    alternatives = math.prod(part.count("|") + 1 for part in text.split("("))
    is_slow = len(REPEAT.findall(text)) > MAX_REPEATS or alternatives > MAX_ALTERNATIVES
    if is_slow or len(text) > MAX_PATTERN_CHARS or REPEATED_GROUP.search(text):
        raise config.fail(
            name, f"patterns with at most {MAX_REPEATS} repeats, none of them of a group, unlike {shown(entry)}"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise config.fail(name, f"regular expressions behind '{PATTERN}'; {shown(entry)} is none ({error})") from None
