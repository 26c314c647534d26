"""A pytest plugin for `make gpu-pack`: tests launch their kernels over a GPU that is not there, which compiles them.

Nothing is computed, so comparisons pass, and a test goes on to its next launch. What tests say then means nothing.
"""

from __future__ import annotations

import torch

from benchmarks.gpu import fake_device


def _passes(*arguments: object, **options: object) -> bool:
    return True


fake_device.install("compile")
for module, name in ((torch.testing, "assert_close"), (torch, "equal"), (torch, "allclose")):
    setattr(module, name, _passes)
