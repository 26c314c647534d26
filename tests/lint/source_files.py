"""The Python files of the repository, by folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (
    "backends",
    "benchmarks",
    "checks",
    "cli",
    "client",
    "demo",
    "dflash_backend",
    "deploy",
    "docs",
    "frontend",
    "kernels",
    "load_tests",
    "model_repository",
    "tools",
)


def python_files(*folders: str) -> list[str]:
    """The paths of all Python files under `folders`, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def definitions(source: str) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module of a source, its classes and its functions. Expressions, most of a tree, hold none."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())
