"""Imports run one way: each room imports only what lies below it, in `dflash_backend` and around it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAVES = {"error_text", "spec_stats", "config", "checkpoints", "messages", "process_watch", "heap", "tenant_names"}
# What each room may import of the others. A room of `dflash_backend` goes by its name in there.
ALLOWED = {
    "error_text": set(),
    "tenant_names": set(),
    "process_watch": set(),
    "heap": set(),
    "settings": set(),
    "config": {"settings", "tenant_names"},
    "spec_stats": set(),
    "messages": {"spec_stats"},
    "checkpoints": {"config", "error_text"},
    "text": LEAVES,
    # Runs the engine's process and talks to it; it imports nothing of the engine.
    "engine_client": LEAVES,
    # What Triton's Python process runs: no torch, so nothing of the engine.
    "triton": LEAVES | {"text", "engine_client", "drafters.resolve"},
    "core": LEAVES,
    "kernels": set(),
    "attention": LEAVES | {"kernels"},
    "models": LEAVES | {"attention", "kernels"},
    "sampling": {"kernels"},
    "drafters": LEAVES | {"sampling", "models", "attention", "kernels"},
    # Of the core the worker knows the plan alone.
    "worker": LEAVES | {"core.plan", "core.scheduler_config", "sampling", "drafters", "models", "attention", "kernels"},
    "engine": LEAVES
    | {"text", "core", "core.plan", "core.scheduler_config", "worker", "drafters", "drafters.resolve", "models"}
    | {"attention"},
    # Whoever measures is a user of the offline API.
    "evaluation": {"config", "error_text", "spec_stats", "text", "engine"},
    "dflash_client": set(),
    # The commands; those that need the engine import it when they run.
    "dflash_cli": {"dflash_client", "config", "checkpoints", "drafters.resolve", "text", "engine", "evaluation"},
}
# Modules that count as rooms of their own: what others may know of theirs.
APART = ("core.plan", "core.scheduler_config", "drafters.resolve")
FOLDERS = {"kernels": "kernels/dflash_kernels", "dflash_client": "client/dflash_client", "dflash_cli": "cli/dflash_cli"}


def imported(path: Path) -> set[str]:
    """The rooms that a file imports; `APART` by themselves."""
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
            elif name.partition(".")[0] in ("dflash_client", "dflash_cli"):
                parts.add(name.partition(".")[0])
    return parts


def files_of(room: str) -> list[Path]:
    folder = ROOT / FOLDERS.get(room, f"dflash_backend/{room}")
    return list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    files = files_of(room)
    assert files
    for file in files:
        wrong = imported(file) - {room} - {part for part in APART if part.startswith(f"{room}.")} - ALLOWED[room]
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_room_is_in_the_table() -> None:
    rooms = {path.stem for path in (ROOT / "dflash_backend").iterdir() if not path.name.startswith("_")}
    assert rooms <= set(ALLOWED)


def test_the_table_has_no_cycle() -> None:
    below: dict[str, set[str]] = {room: {part for part in parts if "." not in part} for room, parts in ALLOWED.items()}
    while ready := {room for room, parts in below.items() if not parts}:
        below = {room: parts - ready for room, parts in below.items() if room not in ready}
    assert not below, f"rooms that import each other: {sorted(below)}"
