"""A launch of each kernel of the mixture of experts, in the shapes of Qwen3-30B-A3B, for `compile_only`."""

from __future__ import annotations

import torch

from dflash_kernels.moe import TILES, experts_mlp
from dflash_kernels.moe_routing import FEW_ENTRIES, group, route

HIDDEN, INNER, NUM_EXPERTS, PER_TOKEN = 2048, 768, 128, 8


def launches() -> None:
    """Every tile; routing and grouping for few tokens and for many."""
    # Nothing is read: the weights of all experts are those of one.
    gate_up = torch.zeros(1, 2 * INNER, HIDDEN, dtype=torch.bfloat16).expand(NUM_EXPERTS, -1, -1)
    down = torch.zeros(1, HIDDEN, INNER, dtype=torch.bfloat16).expand(NUM_EXPERTS, -1, -1)
    weights, experts = route(torch.zeros(4, NUM_EXPERTS, dtype=torch.bfloat16), PER_TOKEN, True)
    for tile in TILES:
        experts_mlp(torch.zeros(4, HIDDEN, dtype=torch.bfloat16), gate_up, down, weights, experts, tile)
    group(torch.zeros(FEW_ENTRIES + 1, 1, dtype=torch.int32), NUM_EXPERTS, TILES[-1].rows)
