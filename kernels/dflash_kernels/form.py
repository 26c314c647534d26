"""Which form operations take: the Triton kernels or their torch references. Asked when models and runners are built."""

from __future__ import annotations

import torch

try:
    import triton
except ImportError:  # a machine without a GPU needs the references only
    triton = None


def takes_kernels(device: torch.device, wanted: str | None = None) -> bool:
    """Whether operations on `device` are kernels: as `wanted` says, "torch" or "triton"; with None on a GPU where the
    package triton is there.

    Raises `ValueError` for other forms, and where Triton's are wanted and the package is missing.
    """
    if wanted is None:
        return device.type == "cuda" and triton is not None
    if wanted not in ("torch", "triton"):
        raise ValueError(f"no operations are called '{wanted}'; there are 'torch' and 'triton'")
    if wanted == "triton" and triton is None:
        raise ValueError("the operations 'triton' need the package triton, which cannot be imported here")
    return wanted == "triton"
