"""The DFlash2 checkpoints that both sides run, as `cases` has those of DFlash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.oracle import cases
from tests.oracle.cases import FULL, MASK_TOKEN_ID, SLIDING, TARGET_LAYER_IDS, VOCAB_SIZE, Step, hashed
from tests.support.tiny_models import HIDDEN, TARGET_LAYERS, save_checkpoint

BLOCK_SIZE = 8
RANK, TOP_K = 8, 6
OWN = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": TOP_K}
# As the published drafters have them: windows on every layer, not causal.
WINDOWS = {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 24, "is_causal": False}

# What a case adds to the plain config; `dflash_config` is merged.
ZLAB: dict[str, dict[str, Any]] = {
    "plain": {},
    "three taps": {"dflash_config": {"conv_kernel_size": 3, "conv_group_size": 4}},
    "non-causal windows": WINDOWS,
    "scales": {
        "dflash_config": {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    },
}
# A prompt, then four accepted tokens and one more, then a whole block; the last block is a shorter one.
STEPS = (Step(21, 5, 7), Step(5, 17, 7), Step(8, 40, 4))

# One sequence that grows token by token, with a block after each, of which nothing is accepted.
GROWING = "non-causal windows"
LENGTHS = 300
# The lengths whose logits are kept; of all others only the drafts are.
KEPT = (1, 2, 16, 25, 300)


def growing_steps() -> list[Step]:
    """A step for each context length from 1 on."""
    anchors = cases.token_ids(LENGTHS)
    return [Step(1, int(anchor), BLOCK_SIZE - 1) for anchor in anchors]


# Windows that hide nothing, since the library's begin elsewhere.
SPECULATORS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "non-causal window": {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 64},
}


def zlab_config(case: str) -> dict[str, Any]:
    """`config.json` of a z-lab case, with the block size inside `dflash_config`, as published."""
    dflash = {"target_layer_ids": TARGET_LAYER_IDS, "mask_token_id": MASK_TOKEN_ID, "block_size": BLOCK_SIZE} | OWN
    changes = ZLAB[case]
    config = cases.drafter_config() | {
        "architectures": ["DFlash2DraftModel"],
        "num_target_layers": TARGET_LAYERS,
        "dtype": "float32",
    }
    return config | changes | {"dflash_config": dflash | changes.get("dflash_config", {})}


def tensors(taps: int = 2, group_size: int = 8, suffix: str = "") -> dict[str, torch.Tensor]:
    """A drafter's tensors. suffix: what follows the names of the selector's two tables."""
    own = {
        "candidate_selector.hidden_projection.weight": hashed("selector hidden", (RANK, HIDDEN), 0.5),
        f"candidate_selector.predecessor_codebook{suffix}": hashed("predecessors", (VOCAB_SIZE, RANK), 1.0),
        f"candidate_selector.successor_codebook{suffix}": hashed("successors", (VOCAB_SIZE, RANK), 1.0),
    }
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{conv}"
            own[f"{name}.base_kernel"] = hashed(f"{name} base", (2, taps, HIDDEN), 1.0)
            rows = 2 * taps * (HIDDEN // group_size)
            own[f"{name}.kernel_projection.weight"] = hashed(f"{name} projection", (rows, HIDDEN))
    return cases.drafter_tensors() | own


def write_zlab(directory: Path, case: str, **changes: Any) -> Path:
    """The drafter of a z-lab case, with these fields of its `dflash_config` changed."""
    config = zlab_config(case)
    dflash = config["dflash_config"] | changes
    taps, group_size = (config["dflash_config"][field] for field in ("conv_kernel_size", "conv_group_size"))
    return save_checkpoint(directory, config | {"dflash_config": dflash}, tensors(taps, group_size))
