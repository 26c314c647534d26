"""Compiles the kernels that are launched before the one before them has ended, and says what PTX they become; a
program, since a kernel is either interpreted or compiled from its definition on.

    python -m tests.kernels.dependent_launches ARCH ...

prints for each kernel and architecture its name, whether the launch is a dependent one, and what `describe` counts.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from dflash_kernels import dependent_launch
from tests.kernels.compile_only import compiled_for

WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
# What ends the first block of a program's instructions, and what touches memory that kernels share.
ENDS, STORES, LOADS = ("bra", "ret"), r"\b(st\.global|atom|red\.)", r"\b(ld\.global|cp\.async|cp\.reduce)"


def describe(ptx: str) -> str:
    """Counts of a kernel's PTX: waits; 1 when the first block of instructions has one; launches of the next kernel in
    front of the wait and behind it; stores and loads of global memory in front of the wait."""
    lines = [line.strip() for line in ptx.partition("\n{\n")[2].splitlines()]
    waits = [number for number, line in enumerate(lines) if WAIT in line]
    first = waits[0] if waits else 0
    block = next((number for number, line in enumerate(lines) if is_end(line)), len(lines))
    launches = [number for number, line in enumerate(lines) if LAUNCH in line]
    before = lines[:first]
    counts = {
        "waits": len(waits),
        "at_once": int(bool(waits) and first < block),
        "early_launches": sum(number < first for number in launches),
        "launches": sum(number > first for number in launches),
        "stores": sum(bool(re.search(STORES, line)) for line in before),
        "loads": sum(bool(re.search(LOADS, line)) for line in before),
    }
    return " ".join(f"{name}={count}" for name, count in counts.items())


def is_end(line: str) -> bool:
    """Whether a block of instructions ends here: by a branch, or as others come here."""
    if line.startswith("$L__BB"):
        return True
    words = line.partition(";")[0].split()
    words = words[1:] if words and words[0].startswith("@") else words
    return bool(words) and words[0].split(".")[0] in ENDS


def report(arch: int, kernel: Any, *args: Any, grid: object = None, warmup: bool = False, **kwargs: Any) -> None:
    """Stands in for `JITFunction.run`."""
    compiled = compiled_for(arch, kernel, *args, **kwargs)
    if "PDL" in kernel.arg_names:
        print(f"{kernel.__name__} {arch} pdl={int(compiled.metadata.launch_pdl)} {describe(compiled.asm['ptx'])}")


def main(archs: list[int]) -> None:
    """Entry point."""
    from triton.runtime.jit import JITFunction

    # Before the kernels are imported, which keep it.
    JITFunction.run = lambda kernel, *args, **kwargs: report(left[0], kernel, *args, **kwargs)
    dependent_launch._has_dependent_launch = lambda: left[0] >= dependent_launch.FIRST_ARCH
    dependent_launch.use_dependent_launch(True)
    left = archs
    while left:
        launch()
        left = left[1:]


def launch() -> None:
    """Each of the kernels; of attention, rows that share workers."""
    from dflash_kernels.activation import gelu_mul, silu_mul
    from dflash_kernels.qk_norm_rope_write import qk_norm_rope_write
    from dflash_kernels.rms_norm import add_rms_norm
    from tests.kernels.model_launches import attend, zeros

    attend([16] * 8, causal=True)
    add_rms_norm(zeros(2, 256), zeros(2, 256), zeros(256), 1e-6)
    silu_mul(zeros(2, 256))
    gelu_mul(zeros(2, 256))
    table, numbers = zeros(8, 64), torch.zeros(2, dtype=torch.int64)
    qk_norm_rope_write(zeros(2, 4 * 64), zeros(3, 64), 1e-6, table, table, numbers, numbers, zeros(8, 2, 1, 64))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
