"""The kernels of a step's operations compile for the GPU they are meant for, whether or not one is here."""

from __future__ import annotations

import pytest

from tests.kernels.compile_only import compiled_kernels

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")


def test_the_kernels_of_a_step_compile_for_hopper() -> None:
    assert compiled_kernels("tests.kernels.step_launches") == {
        "_prepare_kernel",
        "_tile_kernel",
        "_best_kernel",
        "_sum_kernel",
        "_softmax_kernel",
        "_race_kernel",
        "_accept_greedy_kernel",
        "_count_kernel",
        "_replace_kernel",
        "_settle_kernel",
        "_inject_slots_kernel",
        "_prepare_draft_kernel",
        "_store_drafts_kernel",
        "_store_probs_kernel",
    }
