"""Imports run one way: each package imports only what its row of docs/architecture.md names, and no two packages and no
two files import each other, in the whole repository."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lint.source_files import ROOT, SOURCE_FOLDERS, python_files

TABLE = re.compile(r"^\| package \| may import \|\n\|[- |]+\|\n((?:\|.*\n)+)", re.MULTILINE)
# Each import begins a line of its own (ruff: E401, E7), in a function and under TYPE_CHECKING too. Lines are read since
# parsing all files takes eight seconds. One in a text that looks like an import counts, but for a file's own docstring.
IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
DOCSTRING = re.compile(r'\A"""(?:.|\n)*?"""')
NAME = re.compile(r"(?:^|[(,])\s*(?:#.*\s+)*(\w+)")

# What `from dflash_backend import LLM` gives.
OF_THE_ROOT = "engine"


def read_table() -> dict[str, set[str]]:
    """What each package may import of the others, from docs/architecture.md."""
    found = TABLE.search((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert found
    leaves: set[str] = set()
    table: dict[str, set[str]] = {}
    for line in found[1].splitlines():
        packages, imports = line.strip("| ").partition("|")[::2]
        names = set(re.findall(r"`([\w.]+)`", imports)) | (leaves if "leaves" in imports else set())
        if "all above" in imports:
            names = names.union(table, *table.values())
        if packages.strip() == "leaves":
            leaves = names
        table |= dict.fromkeys(re.findall(r"`([\w.]+)`", packages), names)
    return table


ALLOWED = read_table()
# Parts of packages that count as packages: what others may know of theirs, and the folders in them.
APART = sorted({name for names in (ALLOWED, *ALLOWED.values()) for name in names if "." in name})


@functools.cache
def modules() -> dict[str, Path]:
    """Every Python file of the repository by the name of its module."""
    found = {}
    for file in python_files(*SOURCE_FOLDERS, "tests"):
        parts = Path(file).with_suffix("").parts
        name = ".".join(parts[1:] if parts[1].startswith("dflash_") else parts)  # cli/dflash_cli and its like
        found[name.removesuffix(".__init__")] = ROOT / file
    return found


def imports_of(source: str, name: str, known: Iterable[str]) -> dict[str, int]:
    """The modules among `known` that the source of the module `name` imports, and the line of each first import. The
    packages that a module lies in do not count: they are imported whatever the source says."""
    known = set(known)
    found: dict[str, int] = {}
    begin = DOCSTRING.match(source)
    for match in IMPORT.finditer(source, begin.end() if begin else 0):
        module, names, whole = match.groups()
        for target in [whole] if whole else [f"{module}.{each}" for each in NAME.findall(names)]:
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                found.setdefault(target, source.count("\n", 0, match.start()) + 1)
    return found


@functools.cache
def graph() -> dict[str, dict[str, int]]:
    """The modules that each module imports, with the lines."""
    known = modules().keys()
    return {name: imports_of(file.read_text(encoding="utf-8"), name, known) for name, file in modules().items()}


def cycle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules of which each imports the next and the last is the first; none where there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def package_of(module: str) -> str:
    """The package of a module; those of `APART` by themselves."""
    if module == "dflash_backend":
        return OF_THE_ROOT
    name = module.removeprefix("dflash_backend.").replace("dflash_kernels", "kernels", 1)
    return next((part for part in APART if f"{name}.".startswith(f"{part}.")), name.partition(".")[0])


def modules_of(package: str) -> list[str]:
    """Those that the package's row is about: its own, and of `APART` in it those without a row."""
    packages = {package, *(part for part in APART if part.startswith(f"{package}.") and part not in ALLOWED)}
    return [name for name in modules() if package_of(name) in packages]


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    within = {package} | {part for part in APART if part.startswith(f"{package}.")}
    names = modules_of(package)
    assert names
    for name in names:
        wrong = {
            target: line
            for target, line in graph()[name].items()
            if package_of(target) not in within | ALLOWED[package]
        }
        assert not wrong, f"{name} imports, with the lines: {wrong}"


def test_every_package_is_in_the_table() -> None:
    assert {package_of(name) for name in modules()} <= {*ALLOWED, *APART}


def test_the_table_has_no_cycle() -> None:
    below: dict[str, set[str]] = {
        package: {part for part in ALLOWED if part in parts or part.startswith(f"{package}.")}
        for package, parts in ALLOWED.items()
    }
    assert not cycle(below)


def test_no_two_files_import_each_other() -> None:
    found = cycle(graph())
    assert not found, " imports ".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import a", 1),
        ("\nfrom a import f", 2),
        ("if TYPE_CHECKING:\n    from a import (\n        # two\n        f,\n        g,\n    )", 2),
        ("def f() -> None:\n    from math import pi\n\n    from p import (g, c)", 4),
    ],
)
def test_a_cycle_is_found_wherever_its_imports_stand(source: str, line: int) -> None:
    sources = {
        "a": '"""As in\n\nimport d\n"""\nfrom p import c, b as d\n',
        "p.b": source,
        "p.c": "from a import f",
        "p": "",
        "d": "import a",
    }
    imports = {name: imports_of(text, name, sources) for name, text in sources.items()}
    assert line in imports["p.b"].values()
    assert set(imports["a"]) == {"p.b", "p.c"}
    found = cycle(imports)
    assert found[0] == found[-1]
    assert all(target in imports[name] for name, target in pairwise(found))
    del imports["a"]["p.c"]
    assert {"a", "p.b"} <= set(cycle(imports)) <= {"a", "p.b", "p.c"}
    assert cycle(imports | {"p.b": {}}) == []


@pytest.mark.parametrize(
    "package", [part for part in APART if (ROOT / "dflash_backend" / part.replace(".", "/")).is_dir()]
)
def test_a_package_in_a_package_has_one_door(package: str) -> None:
    inner = f"dflash_backend.{package}."
    for name, imports in graph().items():
        past = [target for target in imports if target.startswith(inner)]
        # What looks at the inside of the core is no user of it.
        assert not past or f"{name}.".startswith((inner, "tests.", "checks.core_state.")), (
            f"{name} imports {past}; others import {inner[:-1]}"
        )
