"""Whether an operation runs as its Triton kernel or as its torch reference: asked once, when models and runners are
built."""

from __future__ import annotations

import torch

from dflash_kernels.triton_import import HAS_TRITON


def use_triton(device: torch.device, wanted: str | None = None) -> bool:
    """Whether operations on `device` run as kernels: as `wanted` ("torch" or "triton") says; by default on a GPU where
    the package triton is installed.

    Raises `ValueError` for another `wanted`, and for "triton" where the package is missing.
    """
    if wanted is None:
        return device.type == "cuda" and HAS_TRITON
    if wanted not in ("torch", "triton"):
        raise ValueError(f"no operations are called '{wanted}'; there are 'torch' and 'triton'")
    if wanted == "triton" and not HAS_TRITON:
        raise ValueError("the operations 'triton' need the package triton, which cannot be imported here")
    return wanted == "triton"
