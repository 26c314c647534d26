"""Programmatic dependent launch: a kernel's programs begin while the kernel before it ends, from Hopper on.

A decode cycle is hundreds of small kernels behind one another, and a GPU otherwise begins the next one when the last
program of the one before has ended and its writes are there. A launch that allows it (`launch_pdl`) begins earlier, and
its programs wait in `after_kernel_before` for what the usual order of a stream gives: all kernels before have ended,
and their writes can be seen. Three rules keep that so (CUDA Programming Guide, programmatic dependent launch; PTX,
`griddepcontrol`):

1. every program of such a kernel waits, on every path and before it returns, since a kernel that ended without waiting
   would end before the ones before it, and the next kernel's wait would be no wait for those;
2. before the wait a program reads only what no kernel ever writes, weights, and writes nothing: also a tensor that
   is not read any more may lie in memory that the kernel before still reads;
3. a program lets the next kernel begin after its own wait, never before: so two kernels overlap at the most.

What is launched without it, such as a library's product, waits for all before it as ever. Kernels launched with it have
the constant PDL; `tests/kernels/test_dependent_launch.py` reads the rules off what the compiler makes of them.
"""

from __future__ import annotations

import ctypes
from functools import cache

from dflash_kernels.triton_import import tl, triton

# The first compute capability that has it, and the first driver (CUDA 12.3) that captures it in graphs.
FIRST_ARCH, FIRST_DRIVER = 90, 12030


class _Wanted:
    """Whether this process uses it where it can."""

    value = False


def use_dependent_launch(wanted: bool) -> None:
    """Say whether this process launches kernels so, where the GPU has it; to be called before the first launch of an
    engine, since captured graphs stay as they are."""
    _Wanted.value = wanted


def wants_dependent_launch() -> bool:
    """What `use_dependent_launch` said last; false before."""
    return _Wanted.value


def dependent_launch() -> dict[str, bool]:
    """What a launch of a kernel with the constant PDL says."""
    return _ON if _Wanted.value and _has_dependent_launch() else _OFF


_ON, _OFF = {"PDL": True, "launch_pdl": True}, {"PDL": False}


def driver_version() -> int:
    """The CUDA version of the driver, 12030 for 12.3; 0 where there is none."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton of before
    gdc_wait = gdc_launch_dependents = None


@triton.jit
def after_kernel_before(PDL: tl.constexpr):
    """Wait until all kernels before have ended, then let the next one begin."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def _has_dependent_launch() -> bool:
    """Whether the GPU, its driver and Triton have it; false where kernels are interpreted."""
    if gdc_wait is None or not isinstance(after_kernel_before, triton.JITFunction):
        return False
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # no GPU
        return False
    return target.backend == "cuda" and target.arch >= FIRST_ARCH and driver_version() >= FIRST_DRIVER
