"""Set before anything is imported: kernels run on the GPU where there is one, else under Triton's interpreter.

Triton reads the variable when a kernel's module is imported, and the attention backends import them, so a conftest of
`tests/kernels` alone would come too late.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
