"""The EAGLE-3 checkpoints that both sides run, as `cases` has those of DFlash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.oracle import cases
from tests.oracle.cases import INTERMEDIATE, VOCAB_SIZE, Step, hashed
from tests.support.tiny_models import HIDDEN, eagle3_shapes, save_checkpoint

K = 4
BOUNDARY_IDS = [i + 1 for i in cases.TARGET_LAYER_IDS]

# What the library's config of a case has, beside its layer's kind and a cut vocabulary.
SPECULATORS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "qwen3, cut vocabulary": {"kind": "qwen3", "small_vocabulary": True, "norm_before_residual": True},
    "llama, normed before fc": {"kind": "llama", "small_vocabulary": True, "norm_before_fc": True, "norm_output": True},
    "qwen3, each feature normed": {"kind": "qwen3", "fc_norm": True},
}
# Context lengths at which a case drafts, in one sequence.
LENGTHS = (1, 7, 21)
# One sequence that grows token by token, with drafts after each, of which nothing is accepted; and the lengths whose
# logits are kept: of all others only the drafts are.
GROWING = "qwen3, cut vocabulary"
NUM_LENGTHS = 300
KEPT = (1, 2, 16, 25, 300)
OWN = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def fields(case: str) -> dict[str, bool]:
    """The fields of its norms."""
    return {name: SPECULATORS[case].get(name, False) for name in OWN}


def is_small(case: str) -> bool:
    """Whether its vocabulary is a cut one."""
    return bool(SPECULATORS[case].get("small_vocabulary"))


def tensors(case: str, layer: str = "layers.0.") -> dict[str, torch.Tensor]:
    """A drafter's tensors without embedding and maps. layer: what the names of its layer's begin with."""
    norms = [name for name in ("norm_before_fc", "fc_norm") if SPECULATORS[case].get(name)]
    shapes = eagle3_shapes(layer, INTERMEDIATE, qwen3=SPECULATORS[case]["kind"] == "qwen3", norms=norms)
    shapes["lm_head.weight"] = (len(cases.DRAFT_VOCAB) if is_small(case) else VOCAB_SIZE, HIDDEN)
    return {
        name: hashed(f"eagle3 {name.replace(layer, '')}", shape, 0.75 if name.startswith("lm_head") else 0.25)
        for name, shape in shapes.items()
    }


def saved_tensors(case: str) -> dict[str, torch.Tensor]:
    """As `tensors`, with the target's embedding and the maps of a cut vocabulary, as the library saves them."""
    found = tensors(case) | {"embed_tokens.weight": hashed("embed", (VOCAB_SIZE, HIDDEN), 1.0)}
    return found | cases.vocabulary_maps() if is_small(case) else found


def write_authors_format(directory: Path, case: str) -> Path:
    """The drafter of a case as its authors' code saves one."""
    own = SPECULATORS[case]
    config = (
        cases.drafter_config()
        | fields(case)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": own["kind"],
            "num_hidden_layers": 1,
            "draft_vocab_size": len(cases.DRAFT_VOCAB) if is_small(case) else VOCAB_SIZE,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": cases.TARGET_LAYER_IDS, "use_aux_hidden_state": True},
            "torch_dtype": "float32",
        }
    )
    maps = cases.vocabulary_maps() if is_small(case) else {}
    return save_checkpoint(directory, config, tensors(case, "midlayer.") | maps)


def steps(lengths: tuple[int, ...]) -> list[Step]:
    """The steps of a sequence of which drafts are made at these context lengths, all of them rejected."""
    ids = cases.token_ids(max(lengths) + 1)
    return [Step(n - before, int(ids[n]), K) for before, n in zip((0, *lengths), lengths, strict=False)]
