"""Every kernel is launched with little of the host's time (`dflash_kernels.launcher`)."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import dflash_kernels
from dflash_kernels.launcher import OPTIONS

KERNEL = re.compile(r"( *@cached_launches\n)?( *)@triton\.jit(?:\([^)]*\)\s*)?\n\s*def (\w+_kernel)\(")


def test_every_kernel_has_the_decorator() -> None:
    found = [
        (match[3], match[1] is not None)
        for path in sorted(Path(dflash_kernels.__path__[0]).glob("*.py"))
        for match in KERNEL.finditer(path.read_text())
    ]
    assert len(found) > 30
    assert [name for name, cached in found if not cached] == []


def test_of_equal_values_every_kernel_takes_the_first() -> None:
    """The interpreter does so whatever the flag says; a GPU takes any without it."""
    sources = "".join(path.read_text() for path in sorted(Path(dflash_kernels.__path__[0]).glob("*.py")))
    asked = re.findall(r"return_indices=True(?:,\s*return_indices_tie_break_left=(\w+))?", sources)
    assert len(asked) >= 2
    assert set(asked) == {"True"}
    assert "tie_break_left=False" not in sources


def test_the_launcher_knows_every_option_that_launches_have() -> None:
    """A launch with another one is looked up by Triton each time, which takes twice as long."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    names = {field.name for field in fields(compiler.CUDAOptions)}
    sources = [path.read_text() for path in Path(dflash_kernels.__path__[0]).glob("*.py")]
    used = {name for source in sources for name in re.findall(r"[\s(\"](\w+)(?:=|\": )", source)} & names
    assert {"num_warps", "num_stages", "enable_fp_fusion"} <= used
    assert used <= set(OPTIONS)
