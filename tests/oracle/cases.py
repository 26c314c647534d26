"""The small checkpoints that both sides run, with weights that are the same on every machine.

A weight is a hash of its tensor's name and its place, in whole numbers, so that no version of a random generator
matters and only results need to be kept.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_models import (
    HIDDEN,
    TARGET_LAYERS,
    decoder_config,
    drafter_shapes,
    layer_shapes,
    save_checkpoint,
)

VOCAB_SIZE = 64
DRAFT_VOCAB = [i for i in range(VOCAB_SIZE) if i % 3 != 1][:24]
MASK_TOKEN_ID = 63
INTERMEDIATE = 48
TARGET_LAYER_IDS = [0, 2, 3]
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def hashed(name: str, shape: tuple[int, ...], scale: float = 0.25) -> torch.Tensor:
    """float32 of `shape`, evenly spread over [-scale, scale]; for a norm's weight over [0.5, 1.5]."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    # SplitMix64, whose sums and products wrap around.
    with np.errstate(over="ignore"):
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    values = unit + np.float32(0.5) if "norm" in name else (unit * np.float32(2) - np.float32(1)) * np.float32(scale)
    return torch.from_numpy(values.reshape(shape))


def write_target(directory: Path) -> Path:
    """The target of all cases: Qwen3 of five layers, embedding and LM head apart."""
    tensors = {
        "model.embed_tokens.weight": hashed("embed", (VOCAB_SIZE, HIDDEN), 1.0),
        "lm_head.weight": hashed("head", (VOCAB_SIZE, HIDDEN), 0.5),
        "model.norm.weight": hashed("final norm", (HIDDEN,)),
    }
    for i in range(TARGET_LAYERS):
        shapes = layer_shapes(f"model.layers.{i}.", INTERMEDIATE)
        tensors |= {name: hashed(name.removesuffix(".weight"), shape) for name, shape in shapes.items()}
    own = {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": 0, "tie_word_embeddings": False}
    return save_checkpoint(directory, decoder_config(TARGET_LAYERS, INTERMEDIATE, VOCAB_SIZE) | own, tensors)


def drafter_tensors() -> dict[str, torch.Tensor]:
    """A drafter of z-lab's names, which are those of speculators too."""
    hashed_names = {"hidden_norm": "hidden norm", "norm": "draft norm"}
    shapes = drafter_shapes(len(TARGET_LAYER_IDS), INTERMEDIATE)
    stems = {name: name.removesuffix(".weight") for name in shapes}
    return {name: hashed(hashed_names.get(stems[name], stems[name]), shape) for name, shape in shapes.items()}


def drafter_config() -> dict[str, Any]:
    """The Qwen3 part of a drafter's config."""
    return decoder_config(2, INTERMEDIATE, VOCAB_SIZE) | {"tie_word_embeddings": False}


# Fields that a z-lab case adds to the plain config; `dflash_config` is merged.
SLIDES = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 9}
ZLAB: dict[str, dict[str, Any]] = {
    "plain": {},
    "is_causal": {"is_causal": True},
    "sliding causal": SLIDES,
    "sliding non-causal": SLIDES | {"is_causal": False},
    "windows of the upper layers": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "yarn": {"rope_scaling": YARN},
    "scales": {
        "dflash_config": {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    },
    "fields at the top level": {
        "block_size": None,
        "dflash_config": None,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TARGET_LAYER_IDS,
        "output_multiplier": 2.0,
    },
}


def zlab_config(case: str, block_size: int = 16) -> dict[str, Any]:
    """`config.json` of a z-lab case."""
    dflash = {"target_layer_ids": TARGET_LAYER_IDS, "mask_token_id": MASK_TOKEN_ID}
    config = drafter_config() | {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": dflash,
        "dtype": "float32",
    }
    changes = dict(ZLAB[case])
    if changes.get("dflash_config"):
        changes["dflash_config"] = dflash | changes["dflash_config"]
    config |= changes
    return {name: value for name, value in config.items() if value is not None}


@dataclass(frozen=True)
class SpeculatorsCase:
    """A checkpoint of the speculators library. layer: what its decoder's config adds. small_vocabulary: 24 tokens."""

    layer: dict[str, Any] = field(default_factory=dict)
    small_vocabulary: bool = False
    non_causal: bool = False
    block_size: int = 8


# The windows hide nothing of the contexts that the comparison runs: where they do, the two differ by design.
WIDE = {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 64}
SPECULATORS = {
    "full vocabulary": SpeculatorsCase(block_size=16),
    "cut vocabulary": SpeculatorsCase(small_vocabulary=True),
    "causal window": SpeculatorsCase(WIDE),
    "non-causal window": SpeculatorsCase(WIDE, non_causal=True),
}


@dataclass(frozen=True)
class Step:
    """One step of a row: `num_new` tokens become final, then a block of k drafts follows `anchor`."""

    num_new: int
    anchor: int
    k: int


# A prompt, then four accepted tokens and one more, then a whole block.
STEPS = (Step(21, 5, 15), Step(5, 17, 15), Step(16, 40, 9))
# Speculators runs blocks at anchors of one sequence, each of a whole block.
ANCHORS = (3, 11, 20)
NUM_TOKENS = 40


def features(case: str, num_tokens: int) -> torch.Tensor:
    """float32 `[num_tokens, L * hidden]`: the target's, of a sequence."""
    return hashed(f"features of {case}", (num_tokens, len(TARGET_LAYER_IDS) * HIDDEN), 1.0)


def token_ids(num_tokens: int) -> torch.Tensor:
    """int64 `[num_tokens]`: a sequence without mask tokens."""
    return ((hashed("tokens", (num_tokens,), 1.0) + 1) * 31).long()


def vocabulary_maps() -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a cut vocabulary."""
    ids = torch.tensor(DRAFT_VOCAB)
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True),
    }
