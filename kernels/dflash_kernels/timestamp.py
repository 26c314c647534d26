"""The device's clock, read between other kernels.

There is no reference: on a CPU the host's own clock serves.
"""

from __future__ import annotations

import torch

from dflash_kernels.launcher import cached_launches
from dflash_kernels.triton_import import tl, triton

try:
    from triton.language.extra.cuda import globaltimer
except ImportError:
    globaltimer = None


@cached_launches
@triton.jit
def _timestamp_kernel(marks_ptr, index):
    tl.store(marks_ptr + index, globaltimer())


def timestamp(marks: torch.Tensor, index: int) -> None:
    """Write the device's time in ns to `marks[index]` (int64 `[n]`, on a GPU), behind the kernels queued before."""
    _timestamp_kernel[(1,)](marks, index, num_warps=1)
