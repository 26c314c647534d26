"""A file has at most 700 lines and a function at most 60, in source and tests."""

from __future__ import annotations

import ast

import pytest

from tests.lint.source_files import ROOT, SOURCE_FOLDERS, definitions, python_files

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in python_files(*SOURCE_FOLDERS, "tests")}


def test_files_are_short(sources: dict[str, str]) -> None:
    long = {file for file, text in sources.items() if text.count("\n") > MAX_FILE_LINES}
    assert not long, f"longer than {MAX_FILE_LINES} lines"


def test_functions_are_short(sources: dict[str, str]) -> None:
    long = {
        f"{file}:{node.name}"
        for file, text in sources.items()
        for node in definitions(text)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines"
