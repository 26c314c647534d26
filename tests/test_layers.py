"""Imports run one way: each package imports only what lies below it, in `dflash_backend` and around it."""

from __future__ import annotations

import ast
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
        table |= dict.fromkeys(re.findall(r"`(\w+)`", packages), names)
    return table


ALLOWED = read_table()
# Modules that count as packages of their own: what others may know of theirs.
APART = (
    "core.ending",
    "core.plan",
    "core.prefix_cache",
    "core.scheduler_config",
    "drafters.published",
    "drafters.registry",
    "drafters.resolve",
)
FOLDERS = {
    "kernels": "kernels/dflash_kernels",
    "dflash_client": "client/dflash_client",
    "dflash_openai": "frontend/dflash_openai",
    "dflash_cli": "cli/dflash_cli",
}


def imported(path: Path) -> set[str]:
    """The packages that a file imports; `APART` by themselves."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("dflash_backend."):
                rest = name.removeprefix("dflash_backend.")
                parts.add(rest if rest in APART else rest.partition(".")[0])
            elif name.startswith("dflash_kernels"):
                parts.add("kernels")
            elif name.partition(".")[0] in ("dflash_client", "dflash_openai", "dflash_cli"):
                parts.add(name.partition(".")[0])
    return parts


def files_of(package: str) -> list[Path]:
    folder = ROOT / FOLDERS.get(package, f"dflash_backend/{package}")
    return list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


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
        package: {part for part in parts if "." not in part} for package, parts in ALLOWED.items()
    }
    while ready := {package for package, parts in below.items() if not parts}:
        below = {package: parts - ready for package, parts in below.items() if package not in ready}
    assert not below, f"packages that import each other: {sorted(below)}"
