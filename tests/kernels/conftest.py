"""Kernels run on the GPU where there is one, else under Triton's interpreter, which must be asked for before import."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
