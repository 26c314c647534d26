"""Every kernel is launched with little of the host's time (`dflash_kernels.launcher`)."""

from __future__ import annotations

import re
from pathlib import Path

import dflash_kernels

KERNEL = re.compile(r"( *@cached_launches\n)?( *)@triton\.jit(?:\([^)]*\)\s*)?\n\s*def (\w+_kernel)\(")


def test_every_kernel_has_the_decorator() -> None:
    found = [
        (match[3], match[1] is not None)
        for path in sorted(Path(dflash_kernels.__path__[0]).glob("*.py"))
        for match in KERNEL.finditer(path.read_text())
    ]
    assert len(found) > 30
    assert [name for name, cached in found if not cached] == []
