"""The kernels compile for the GPU they are meant for, whether or not one is here."""

from __future__ import annotations

import pytest

from tests.kernels.compile_only import compiled_kernels

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")

KERNELS = {
    "model_launches": {
        "_rms_norm_kernel",
        "_silu_mul_kernel",
        "_qk_norm_rope_write_kernel",
        "_context_write_kernel",
        "_attend_kernel",
        "_merge_kernel",
    },
    "moe_launches": {"_route_kernel", "_group_kernel", "_gate_up_kernel", "_down_kernel", "_sum_kernel"},
    "step_launches": {
        "_prepare_kernel",
        "_tile_kernel",
        "_reduce_kernel",
        "_filtered_softmax_kernel",
        "_draw_kernel",
        "_accept_greedy_kernel",
        "_count_kernel",
        "_resample_kernel",
        "_write_kernel",
        "_inject_slots_kernel",
        "_prepare_draft_kernel",
        "_store_drafts_kernel",
        "_store_probs_kernel",
    },
    "test_timestamp": {"_timestamp_kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize("module", KERNELS)
def test_every_kernel_compiles_for_hopper(module: str) -> None:
    assert compiled_kernels(f"tests.kernels.{module}") == KERNELS[module]
