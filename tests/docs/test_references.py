"""Each file and function that the pages about the source name exists."""

from __future__ import annotations

import ast
import re

from tests.docs.conftest import ROOT, page

PAGES = ("README.md", "architecture.md", "dflash.md", "contributing.md", "scheduling.md", "gpu.md", "checkpoints.md")
REFERENCE = re.compile(r"`([\w/]+\.py)(?::(\w+))?`")


def test_files_and_functions_that_the_pages_name_exist() -> None:
    references = {match for name in PAGES for match in REFERENCE.findall(page(name))}
    assert len(references) > 50
    missing = sorted(f"{file}:{name}" for file, name in references if not _is_defined(file, name))
    assert not missing


def _is_defined(file: str, name: str) -> bool:
    for folder in (ROOT, ROOT / "dflash_backend"):
        path = folder / file
        if path.is_file():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            return not name or any(name in _names(node) for node in ast.walk(tree))
    return False


def _names(node: ast.AST) -> list[str]:
    """What a definition or an assignment names."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
