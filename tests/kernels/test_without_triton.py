"""Where the package triton is not installed, kernels are defined and references run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

KERNELS = Path(__file__).resolve().parents[2] / "kernels/dflash_kernels"


def test_what_stands_in_for_triton_leaves_kernels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found = SimpleNamespace(**runpy.run_path(str(KERNELS / "triton_import.py")))

    def kernel() -> None: ...

    assert not found.HAS_TRITON
    assert found.triton.jit(kernel) is kernel
    assert found.triton.jit(do_not_specialize=["size"])(kernel) is kernel
    assert not isinstance(kernel, found.triton.JITFunction)
    assert found.tl.constexpr(7) == 7


def test_a_file_of_a_kernel_gives_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found = runpy.run_path(str(KERNELS / "triton_import.py"))
    monkeypatch.setitem(sys.modules, "dflash_kernels.triton_import", SimpleNamespace(**found))
    activation = SimpleNamespace(**runpy.run_path(str(KERNELS / "activation.py")))
    expected = torch.nn.functional.silu(torch.tensor([[2.0]])) * 3.0
    assert torch.equal(activation.silu_mul_reference(torch.tensor([[2.0, 3.0]])), expected)
    assert callable(activation.silu_mul)
