"""The kernels of the mixture of experts compile for the GPU they are meant for, whether or not one is here."""

from __future__ import annotations

import pytest

from tests.kernels.compile_only import compiled_kernels

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")


def test_the_kernels_of_the_experts_compile_for_hopper() -> None:
    assert compiled_kernels("tests.kernels.moe_launches") == {
        "_route_kernel",
        "_group_kernel",
        "_gate_up_kernel",
        "_down_kernel",
        "_sum_kernel",
    }
