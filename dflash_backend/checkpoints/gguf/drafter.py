"""DFlash drafters in GGUF, architecture `dflash`, as llama.cpp's converter writes them of z-lab's checkpoints.

The file has the ids of layers as boundary ids, names the mask token among the tokens, and does not say how many layers
the target has: the ids are held to the target that is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_backend.checkpoints.gguf.parts import Part, whole
from dflash_backend.checkpoints.gguf.reader import GgufModel, GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import FULL, SLIDING

NAME, ARCHITECTURE = "dflash", "DFlashDraftModel"
FIELDS = (
    *("block_size", "target_layers", "attention.sliding_window_pattern", "embedding_scale", "logit_scale"),
    *("final_logit_softcapping", "rope.dimension_sections", "conv_kernel_size", "conv_group_size", "selector_rank"),
    *("selector_top_k", "attention.value_scale", "hidden_act"),
)
OUTER = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    # DFlash2
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
# Of DFlash2's layers.
BARE = {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}


def read_drafter(model: GgufModel, fields: JsonReader, config: dict[str, Any]) -> dict[str, Any]:
    """What z-lab's `config.json` says of the same drafter. Raises `CheckpointError`."""
    boundaries = fields.integers("target_layers")
    if not boundaries or min(boundaries) < 1:
        raise fields.fail("target_layers", "the boundary ids of the target's layers that it reads, each at least 1")
    if fields.number("attention.value_scale", default=1.0) != 1.0:
        raise fields.fail("attention.value_scale", "1: another scale of values is not read from GGUF")
    if fields.string("hidden_act", default="silu") != "silu":
        raise fields.fail("hidden_act", "silu")
    tokens = JsonReader(dict(model.metadata), str(model.path))
    own: dict[str, Any] = {
        "target_layer_ids": [i - 1 for i in boundaries],
        "mask_token_id": tokens.integer("tokenizer.ggml.mask_token_id", low=0),
    }
    if "attention.causal" in fields:
        own["causal"] = fields.boolean("attention.causal", default=False)
    own |= {ours: fields.number(name) for name, ours in SCALES.items() if name in fields}
    is_second = "selector_hidden.weight" in model.tensors
    if is_second:
        own |= {name: fields.integer(name) for name in SELECTOR}
    embedding = model.tensors.get("token_embd.weight")
    listed = tokens.data.get("tokenizer.ggml.tokens")
    return {
        "architectures": ["DFlash2DraftModel" if is_second else ARCHITECTURE],
        "vocab_size": embedding.shape[0] if embedding is not None else _vocab_size(fields, listed),
        "block_size": fields.integer("block_size", default=16, low=2),
        "dflash_config": own,
        "tie_word_embeddings": False,
        **_windows(fields, config["num_hidden_layers"]),
    }


def _vocab_size(fields: JsonReader, listed: Any) -> int:
    if "vocab_size" in fields or not isinstance(listed, list):
        return fields.integer("vocab_size", low=2)
    return len(listed)


def _windows(fields: JsonReader, num_layers: int) -> dict[str, Any]:
    window = fields.integer("attention.sliding_window", default=0, low=0)
    if not window:
        return {}
    slides = fields.data.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != num_layers or not {*slides} <= {True, False}:
        raise fields.fail("attention.sliding_window_pattern", f"true or false for each of {num_layers} layers")
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": [SLIDING if each else FULL for each in slides],
    }


def drafter_parts(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """What has other names than in targets."""
    return {ours: whole(tensors.pop(theirs)) for theirs, ours in BARE.items() if theirs in tensors}
