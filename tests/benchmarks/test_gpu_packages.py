"""`make bench-gpu` and `make test-gpu` start on a machine that has torch, triton, numpy and pytest, with the packages
that `make gpu-packages` brings along."""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import ENGINE_PACKAGES

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *(ROOT / name for name in ("kernels", "client", "cli", "frontend"))]
# What such a machine has besides Python.
THERE = {"torch", "triton", "numpy", "jinja2"}  # the last one comes with torch
# It has `transformers`, which brings `tokenizers` and `safetensors`.
WITH_TRANSFORMERS = {"tokenizers", "safetensors"}


def source_of(module: str) -> Path | None:
    """The file of a module of the project."""
    for folder in FOLDERS:
        path = folder.joinpath(*module.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
    return None


def imported_at_once(path: Path) -> set[str]:
    """The modules that importing a file imports, outside of functions, of `if TYPE_CHECKING` and of what may fail."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def packages_of(module: str) -> set[str]:
    """The packages of others that importing a module of the project takes."""
    seen: set[str] = set()
    packages: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = source_of(name)
        if path is None:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and source_of(top) is None and not (ROOT / top).is_dir():
                packages.add(top)
            continue
        todo += imported_at_once(path) | {name.rpartition(".")[0]} - {""}
    return packages


def test_what_the_engine_imports_is_looked_for_and_brought_along() -> None:
    needed = packages_of("benchmarks.gpu.part") - THERE
    assert needed == set(ENGINE_PACKAGES)
    assert packages_of("benchmarks.gpu.run") - THERE <= needed
    assert packages_of("dflash_backend.engine.llm") - THERE - needed == {"zmq"}, "the tests of engines take it too"
    recipe = re.search(r"^gpu-packages:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    fetched = set(recipe[1].split())
    assert needed - WITH_TRANSFORMERS <= fetched
    assert "pyzmq" in fetched
    # llguidance's wheel has this tag and none that is lower.
    assert "manylinux_2_31_x86_64" in recipe[1]
    for name in needed:
        assert find_spec(name) is not None


def test_workers_of_the_gpu_tests_have_the_seed_that_the_report_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNEL_SEED", raising=False)
    monkeypatch.delitem(sys.modules, "tests.gpu.fresh_inputs", raising=False)
    import tests.gpu.fresh_inputs as fresh

    assert os.environ["KERNEL_SEED"] == str(fresh.BASE_SEED)
    assert fresh.pytest_report_header() == f"fresh inputs: KERNEL_SEED={fresh.BASE_SEED}"
    monkeypatch.delitem(sys.modules, "tests.gpu.fresh_inputs")
    import tests.gpu.fresh_inputs as again

    assert again.BASE_SEED == fresh.BASE_SEED
