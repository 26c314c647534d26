"""A launch of each kind of experts that stay quantised, in the shapes of Qwen3-30B-A3B, for `compile_only`. Every tile
where there is time, as in `make nightly`; `benchmarks.gpu.quantised_table` has them all on five architectures."""

from __future__ import annotations

import torch

from benchmarks.gpu.quantised_table import (
    MOE_HIDDEN,
    MOE_INNER,
    MXFP4_EXPERTS,
    NUM_EXPERTS,
    PER_TOKEN,
    form_of,
    weight_of,
)
from dflash_kernels.quantised_linear import BY_FLOAT32, BY_INTEGERS, DIRECTLY
from dflash_kernels.quantised_moe import TILES, WIDE_TILE, quantised_experts_mlp
from tests.support.scale import SCALE

# Scheme, how its codes are read, dtype of the activations.
SCHEMES = (
    ("FP8, 128 x 128", BY_FLOAT32, torch.bfloat16),
    ("FP8, 128 x 128", DIRECTLY, torch.bfloat16),
    ("FP8, rows", BY_INTEGERS, torch.float16),
    ("INT8, rows", BY_INTEGERS, torch.bfloat16),
    ("INT4, groups of 128", BY_INTEGERS, torch.bfloat16),
    ("INT4, groups of 128, zero points", BY_INTEGERS, torch.float16),
    (MXFP4_EXPERTS, BY_INTEGERS, torch.bfloat16),
)


def launch_quantised_experts() -> None:
    """Each scheme; nothing is read, so that weights have the memory of one number."""
    chosen = torch.zeros(4, PER_TOKEN, dtype=torch.int32)
    for scheme, reading, dtype in SCHEMES:
        gate_up = weight_of(scheme, NUM_EXPERTS * 2 * MOE_INNER, MOE_HIDDEN)
        down = weight_of(scheme, NUM_EXPERTS * MOE_HIDDEN, MOE_INNER)
        x = torch.zeros(4, MOE_HIDDEN, dtype=dtype)
        for tile in TILES if SCALE >= 4 else TILES[:1]:
            form, is_gelu = form_of(scheme, x), scheme == "FP8, rows"
            weights = chosen.to(dtype)
            quantised_experts_mlp(x, gate_up, down, weights, chosen, *form, tile, reading, is_gelu=is_gelu)
        quantised_experts_mlp(x.float(), gate_up, down, chosen.float(), chosen, None, None, WIDE_TILE, reading)
