"""Bounds are told in a time that grows with a grammar's text and no faster: no other thread of the engine runs
meanwhile."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.bounds import (
    MAX_TRIED_EXPRESSIONS,
    BoundError,
    check_bounds,
    expression_grammars,
    is_heavy,
    num_parts,
)

SIZE = 60_000
LIMIT_S = 2.0


def many_terminals(size: int) -> str:
    names = [f"A{number}" for number in range(size // 20)]
    return f"start: {' | '.join(names)}\n" + "".join(f'{name}: "a"?\n' for name in names)


def nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"allOf": [leaf]}
    return leaf


GRAMMARS: dict[str, tuple[Any, str]] = {
    "a class that never ends": ("regex", "[" + "[:" * (SIZE // 2)),
    "classes that never end": ("regex", "[" * SIZE),
    "classes in a pattern": ("json", json.dumps({"type": "string", "pattern": "[" + "[:" * (SIZE // 2)})),
    "a string that never ends": ("grammar", 'start: "' + '\\"' * (SIZE // 2)),
    "an expression that never ends": ("grammar", "start: /" + "\\/" * (SIZE // 2)),
    "lines without a name": ("grammar", "start: " + "_" * SIZE),
    "values that are no JSON": ("grammar", "start: " + "%json [" * SIZE),
    "a terminal that names another often": ("grammar", "A: " + "T " * (SIZE // 4) + "\nT: " + "B " * (SIZE // 4)),
    "terminals of terminals": ("grammar", "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(SIZE // 20))),
    "terminals that name one of many names": (
        "grammar",
        "".join(f"A{n}: T A{n + 1}\n" for n in range(SIZE // 20)) + "T: " + "B " * (SIZE // 3),
    ),
    "many terminals": ("grammar", many_terminals(SIZE)),
    "intersections beside definitions": (
        "json",
        json.dumps({"$defs": {"a": "x" * SIZE}, "properties": {str(n): {"allOf": [n]} for n in range(SIZE // 40)}}),
    ),
    "intersections within each other": ("json", json.dumps(nested(300, [{"pattern": "a?"}] * (SIZE // 20)))),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_bounds_are_told_in_a_time_that_grows_with_the_text(name: str) -> None:
    grammar = StructuredOutputs(*GRAMMARS[name])
    began = time.process_time()
    is_heavy(grammar)
    with contextlib.suppress(BoundError):
        check_bounds(grammar)
    grammars = expression_grammars(grammar)
    assert time.process_time() - began < LIMIT_S
    assert len(grammars) <= 2 * MAX_TRIED_EXPRESSIONS


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("[a?b*]c?", 1),
        ("[[:alpha:]?]d?", 2),
        (r"[\]?]e?", 1),
        (r"\[f?", 1),
        ("[]?]g?", 1),
        ("(?x)h? # [\ni?j? # ]", 4),
        ("(?ix:k?)", 2),
    ],
)
def test_parts_are_those_outside_of_classes(expression: str, parts: int) -> None:
    assert num_parts(expression) == parts


def test_flags_behind_an_expression_are_read() -> None:
    with pytest.raises(BoundError, match="optional or repeated parts"):
        check_bounds(StructuredOutputs("grammar", "start: /# [\n" + "a?" * 600 + "# ]/x\n"))


@pytest.mark.parametrize("repeated", ['"a"?B ', '"a"?_B ', "B?B "])
def test_a_mark_counts_that_a_name_follows(repeated: str) -> None:
    text = f'?start: A\nA: {repeated * 600}\nB: "b"\n_B: "c"\n?rule: "d"\n'
    with pytest.raises(BoundError, match="600 optional or repeated parts in the terminal A"):
        check_bounds(StructuredOutputs("grammar", text))


def test_a_terminal_that_is_named_often_counts_as_often() -> None:
    text = 'start: A\nA: B B C\nB: C C\nC: "c"' + "?" * 1 + "\n"
    repeated = "D: " + "A " * 101 + "\n"
    with pytest.raises(BoundError, match="terminal D"):
        check_bounds(StructuredOutputs("grammar", text + repeated))
    check_bounds(StructuredOutputs("grammar", text))
