"""From what `--dataset` says to questions: the embedded sets, any JSONL file, or a set from the hub."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dflash_backend.config import asset_path
from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.hub_sets import HUB_SETS, HubSet, read_hub_set
from dflash_backend.evaluation.questions import Question, read_question, read_rows

SHUFFLE_SEED = 42

# The demo pair's held-out questions: neither of its models has seen them.
EMBEDDED_SETS = ("math", "code", "chat", "talk", "copy", "tools")
DEFAULT_SETS = EMBEDDED_SETS[:3]
"""What is measured where no set is named."""


@dataclass(frozen=True, slots=True)
class Source:
    """One data set to run: an embedded set, a `file` in our own format, or a `hub_set`, from the hub or from a `file`
    that has its rows as published."""

    name: str
    file: Path | None = None
    hub_set: HubSet | None = None


def parse_source(text: str) -> Source:
    """`NAME`, `FILE` or `NAME=FILE`. Raises `ValueError` with what is allowed; a file is opened later."""
    if text in EMBEDDED_SETS:
        return Source(text)
    name, separator, file = text.partition("=")
    if name in HUB_SETS and bool(separator) == bool(file):
        return Source(name, Path(file).expanduser() if file else None, HUB_SETS[name])
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError(
            f"'{text}' is neither a file nor a data set; the sets are {', '.join((*EMBEDDED_SETS, *HUB_SETS))}, and "
            f"each of {', '.join(HUB_SETS)} can be read from a file as NAME=FILE.jsonl"
        )
    return Source(path.stem, path)


def load_questions(sources: Sequence[Source], limit: int | None = None, shuffle: bool = False) -> list[Question]:
    """The questions of all sources, the first `limit` of each. Raises `EvaluationError`.

    shuffle: each set is put in the order first in which the DFlash authors' `benchmark.py` takes its rows
    (`random.Random(42).shuffle`), so that a limit keeps the rows that theirs does.
    """
    questions: list[Question] = []
    names: set[str] = set()
    for source in sources:
        if source.name in names:
            raise EvaluationError(f"two data sets are called '{source.name}'; name each once, or rename a file")
        names.add(source.name)
        found = list(islice(_read(source), None if shuffle else limit))
        if not found:
            raise EvaluationError(f"{source.file or source.name} has no rows; an evaluation needs at least one")
        if shuffle:
            random.Random(SHUFFLE_SEED).shuffle(found)
        questions += found[:limit]
    return questions


def _read(source: Source) -> Iterator[Question]:
    if source.hub_set is not None:
        return read_hub_set(source.hub_set, source.file)
    file = source.file or asset_path("demo", "held_out", f"{source.name}.jsonl")
    return (read_question(row, source.name, number) for number, row in enumerate(read_rows(file), 1))
