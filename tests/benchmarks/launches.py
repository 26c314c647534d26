"""Launches of a kernel by Triton and by `dflash_kernels.launcher` over a driver that runs nothing; a program, since a
process with that driver can run no kernel any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.counting_driver import KernelCounts, install
from dflash_kernels.launcher import CachedRun, cached_launches

# Two of them differ in the constant alone, two in each option alone.
OPTIONS: tuple[dict[str, int], ...] = (
    {"BLOCK": 16},
    {"BLOCK": 32},
    {"BLOCK": 32, "num_warps": 8},
    {"num_warps": 2, "BLOCK": 32},
    {"BLOCK": 32, "enable_fp_fusion": False},
)


def check(kernel: Any, counts: KernelCounts) -> None:
    """Of each launch the kernel that Triton finds is run, with the same arguments; and none is compiled besides."""
    run: CachedRun = kernel.run
    by_triton = run.by_triton
    aligned, other = torch.zeros(64), torch.zeros(64)[1:]
    half, whole = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    seen: list[tuple[Any, ...]] = []
    for pointer in (aligned, other, half, whole, None):
        for number in (1, 2, 16, 17, 32, -3, 1 << 33, 1 << 40):
            for step in (1, 16, 1 << 33):
                for options in OPTIONS:
                    arguments = (pointer, number, step, 0.5)
                    for _ in range(2):
                        calls.clear()
                        run.by_triton(*arguments, grid=(3, 2), warmup=False, **options)
                        expected = list(calls)
                        num_compiled = len(counts.compiled)
                        calls.clear()
                        kernel[(3, 2)](*arguments, **options)
                        assert calls == expected, (arguments, options, calls, expected)
                        assert len(counts.compiled) == num_compiled
                    seen.append(expected[0])
    assert len({number for number, _ in seen}) > 20
    # A launch that was seen is found without Triton, whatever options it has.
    run.by_triton = never
    for options in OPTIONS:
        kernel[(3, 2)](aligned, 2, 16, 0.5, **options)
    run.by_triton = by_triton
    # Grids of one and of three numbers.
    for grid in ((5,), (5, 6, 7), torch.Size([5, 6])):
        calls.clear()
        kernel[grid](aligned, 2, 2, 0.5, BLOCK=16)
        assert calls[0][1][:3] == (*grid, 1, 1)[:3]


calls: list[tuple[Any, ...]] = []


def never(*arguments: Any, **options: Any) -> None:
    """Stands in for Triton's own launch where none is expected."""
    raise AssertionError(f"a launch with {options} took Triton's way")


def main() -> None:
    """Entry point."""
    counts = install()
    import triton
    import triton.language as tl

    from benchmarks.gpu import counting_driver

    numbers: dict[Any, int] = {}

    def record(self: Any, *arguments: Any) -> None:
        plain = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
        calls.append((numbers.setdefault(self, len(numbers)), (*plain[:3], *plain[9:])))

    counting_driver._CountedKernel.run = record  # type: ignore[method-assign]

    @cached_launches
    @triton.jit(do_not_specialize=["step"])
    def _some_kernel(x_ptr, number, step, scale, BLOCK: tl.constexpr):
        pass

    check(_some_kernel, counts)
    with pytest.raises(TypeError, match="constants of a kernel come last"):

        @cached_launches
        @triton.jit
        def _other_kernel(BLOCK: tl.constexpr, x_ptr):
            pass

    print("every launch is Triton's")


if __name__ == "__main__":
    main()
