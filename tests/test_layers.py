"""Imports run one way: each package imports only what lies below it, in `dflash_backend` and around it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"^\| package \| may import \|\n\|[- |]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def read_table() -> dict[str, set[str]]:
    """What each package may import of the others, from docs/architecture.md."""
    found = TABLE.search((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert found
    leaves: set[str] = set()
    table: dict[str, set[str]] = {}
    for line in found[1].splitlines():
        packages, imports = line.strip("| ").partition("|")[::2]
        names = set(re.findall(r"`([\w.]+)`", imports)) | (leaves if "leaves" in imports else set())
        if packages.strip() == "leaves":
            leaves = names
        table |= dict.fromkeys(re.findall(r"`([\w.]+)`", packages), names)
    return table


ALLOWED = read_table()
# Parts of packages that count as packages: what others may know of theirs, and the folders in them.
APART = sorted({name for names in (ALLOWED, *ALLOWED.values()) for name in names if "." in name})
FOLDERS = {
    "kernels": "kernels/dflash_kernels",
    "dflash_client": "client/dflash_client",
    "dflash_openai": "frontend/dflash_openai",
    "dflash_cli": "cli/dflash_cli",
}


def package_of(module: str) -> str:
    """The package of a module of `dflash_backend`; those of `APART` by themselves."""
    return next((part for part in APART if f"{module}.".startswith(f"{part}.")), module.partition(".")[0])


@functools.cache
def imported_modules(path: Path) -> list[str]:
    """The modules that a file imports, by their names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return names


def imported(path: Path) -> set[str]:
    """The packages that a file imports; `APART` by themselves."""
    parts = set()
    for name in imported_modules(path):
        if name.startswith("dflash_backend."):
            parts.add(package_of(name.removeprefix("dflash_backend.")))
        elif name.startswith("dflash_kernels"):
            parts.add("kernels")
        elif name.partition(".")[0] in ("dflash_client", "dflash_openai", "dflash_cli"):
            parts.add(name.partition(".")[0])
    return parts


def files_of(package: str) -> list[Path]:
    folder = ROOT / FOLDERS.get(package, f"dflash_backend/{package.replace('.', '/')}")
    if not folder.is_dir():
        return [folder.with_suffix(".py")]
    apart = {file for part in ALLOWED if part.startswith(f"{package}.") for file in files_of(part)}
    return [file for file in folder.rglob("*.py") if file not in apart]


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = files_of(package)
    assert files
    for file in files:
        wrong = (
            imported(file) - {package} - {part for part in APART if part.startswith(f"{package}.")} - ALLOWED[package]
        )
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_package_is_in_the_table() -> None:
    packages = {path.stem for path in (ROOT / "dflash_backend").iterdir() if not path.name.startswith("_")}
    assert packages <= set(ALLOWED)


def test_the_table_has_no_cycle() -> None:
    below: dict[str, set[str]] = {
        package: {part for part in ALLOWED if part in parts or part.startswith(f"{package}.")}
        for package, parts in ALLOWED.items()
    }
    while ready := {package for package, parts in below.items() if not parts}:
        below = {package: parts - ready for package, parts in below.items() if package not in ready}
    assert not below, f"packages that import each other: {sorted(below)}"


@pytest.mark.parametrize(
    "package", [part for part in APART if (ROOT / "dflash_backend" / part.replace(".", "/")).is_dir()]
)
def test_a_package_in_a_package_has_one_door(package: str) -> None:
    inner = f"dflash_backend.{package}."
    for other in ALLOWED:
        for file in files_of(other) if other != package else ():
            past = [name for name in imported_modules(file) if name.startswith(inner)]
            assert not past, f"{file.relative_to(ROOT)} imports {past}; others import from {inner.rstrip('.')}"
