"""Counts the lines of the product's Python files by kind: `python -m tools.lines [FOLDER ...]`.

Kinds: code, imports, docstrings, comments, blank lines. A line with code and a comment is code.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

PRODUCT = ("dflash_backend", "kernels", "client", "cli", "frontend", "model_repository", "backends")
KINDS = ("code", "import", "docstring", "comment", "blank")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(path: Path) -> Counter[str]:
    """The lines of one file by kind."""
    source = path.read_text()
    lines = source.splitlines()
    kinds = ["blank" if not line.strip() else "code" for line in lines]
    for number, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            kinds[number] = "comment"

    def mark(node: ast.stmt, kind: str) -> None:
        kinds[node.lineno - 1 : node.end_lineno] = [kind] * ((node.end_lineno or node.lineno) - node.lineno + 1)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            mark(node, "import")
        for statement in node.body if isinstance(node, _DOCUMENTED) else ():
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                mark(statement, "docstring")
    return Counter(kinds)


def main(folders: list[str]) -> int:
    print(f"| folder | files | {' | '.join(KINDS)} |\n| --- |{' ---: |' * (len(KINDS) + 1)}")
    everything, num_files = Counter[str](), 0
    for folder in folders:
        paths = sorted(Path(folder).rglob("*.py"))
        total = sum(map(count, paths), Counter[str]())
        print(f"| {folder} | {len(paths)} | {' | '.join(str(total[kind]) for kind in KINDS)} |")
        everything, num_files = everything + total, num_files + len(paths)
    print(f"| sum | {num_files} | {' | '.join(str(everything[kind]) for kind in KINDS)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(PRODUCT)))
