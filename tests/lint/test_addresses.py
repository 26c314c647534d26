"""Memory whose address goes to C++ belongs to something that has a name.

What a call returns is gone as soon as its address has been taken, before the function that gets the address has run: a
call into a library lets go of the interpreter's lock, and another thread's array may lie there by then.
"""

from __future__ import annotations

import ast

from tests.lint.source_files import ROOT

FOLDERS = ("kernels", "dflash_backend")
# A storage lives as long as its tensor.
LASTING = {"untyped_storage"}


def addresses_of_temporaries(source: str) -> list[int]:
    """The lines that take `.ctypes` or `.data_ptr()` of what a call returns."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (
            isinstance(node, ast.Attribute) and node.attr in {"ctypes", "data_ptr"} and isinstance(node.value, ast.Call)
        ):
            continue
        called = node.value.func
        if not (isinstance(called, ast.Attribute) and called.attr in LASTING):
            lines.append(node.lineno)
    return lines


def test_addresses_are_of_what_is_kept() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in addresses_of_temporaries(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_temporaries_are_found() -> None:
    assert addresses_of_temporaries("call(\n    state().ctypes.data, x.contiguous().data_ptr())") == [2, 2]
    assert addresses_of_temporaries("call(state.ctypes.data, x.untyped_storage().data_ptr())") == []
