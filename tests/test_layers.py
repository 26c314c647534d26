"""Imports run one way, as the README's rooms do: frontend, core, worker, speculative, models, attention, kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAVES = {"config", "checkpoints", "messages"}
# What each part of `dflash_backend` may import of the others; `kernels` stands for `dflash_kernels`.
ALLOWED = {
    "tenant_names": set(),
    "client_json": set(),
    "vllm_parameters": set(),
    "process_watch": set(),
    "config": {"tenant_names"},
    "messages": set(),
    "checkpoints": {"config"},
    "sampling_params": {"messages", "client_json", "tenant_names", "vllm_parameters"},
    "frontend": LEAVES | {"sampling_params", "client_json", "process_watch"},
    "core": LEAVES,
    "attention": LEAVES | {"kernels"},
    "models": LEAVES | {"attention", "kernels"},
    "speculative": LEAVES | {"models", "attention", "kernels"},
    "inspection": LEAVES | {"attention", "models"},
    # Whoever measures is a user of the offline API; the figures themselves need nothing of the engine.
    "evaluation": {"config", "frontend", "llm"},
    # Of the core the worker knows the plan alone.
    "worker": LEAVES | {"core.plan", "speculative", "models", "attention", "kernels"},
}


def imported(path: Path) -> set[str]:
    """The parts of the project that a file imports, `core.plan` apart from the rest of the core."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("dflash_backend."):
                rest = name.removeprefix("dflash_backend.")
                parts.add("core.plan" if rest == "core.plan" else rest.partition(".")[0])
            elif name.startswith("dflash_kernels"):
                parts.add("kernels")
    return parts


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    folder = ROOT / "dflash_backend" / part
    files = list(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    for file in files:
        own = {part, f"{part}.plan"}
        strange = imported(file) - own - ALLOWED[part]
        assert not strange, f"{file.relative_to(ROOT)} imports {sorted(strange)}"


def test_kernels_know_neither_models_nor_requests() -> None:
    for file in (ROOT / "kernels").rglob("*.py"):
        assert imported(file) <= {"kernels"}
