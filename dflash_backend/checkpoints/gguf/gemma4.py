"""Gemma 4 in GGUF: heads of two sizes, and factors of the frequencies in place of a rotated share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_backend.checkpoints.gguf.parts import Part, missing, whole
from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import FULL, SLIDING, CheckpointError

FIELDS = (
    *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers", "rope.freq_base_swa"),
    *("attention.sliding_window_pattern", "embedding_length_per_layer_input", "final_logit_softcapping"),
    *("rope.dimension_count_swa", "expert_feed_forward_length"),
)
PARTS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}
# Names that have no `.weight` in Hugging Face's checkpoint.
BARE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
}
# A frequency that is divided by so much is not rotated.
UNROTATED = 1e20


def read_gemma4(
    fields: JsonReader, config: dict[str, Any], names: frozenset[str], factors: list[float] | None
) -> dict[str, Any]:
    """What `config.json` says of the layers. names: of all tensors. Raises `CheckpointError`."""
    num_layers = config["num_hidden_layers"]
    slides = fields.data.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != num_layers or not {*slides} <= {True, False}:
        raise fields.fail("attention.sliding_window_pattern", f"true or false for each of {num_layers} layers")
    if slides[-1]:
        raise fields.fail("attention.sliding_window_pattern", "false for the last layer, which sees everything")
    heads = {kind: _kv_heads(fields, slides, kind) for kind in (True, False)}
    head_dim, sliding_dim = fields.integer("attention.key_length"), fields.integer("attention.key_length_swa")
    for field, expected in (
        ("attention.value_length", head_dim),
        ("attention.value_length_swa", sliding_dim),
        ("rope.dimension_count", head_dim),
        ("rope.dimension_count_swa", sliding_dim),
    ):
        if fields.integer(field, default=expected) != expected:
            raise fields.fail(field, f"{expected}, the size of a head")
    full = [i for i, each in enumerate(slides) if not each]
    theta = fields.number("rope.freq_base", default=1_000_000.0)
    found: dict[str, Any] = {
        "layer_types": [SLIDING if each else FULL for each in slides],
        "sliding_window": fields.integer("attention.sliding_window"),
        "head_dim": sliding_dim,
        "global_head_dim": head_dim,
        "num_key_value_heads": heads[True],
        "num_global_key_value_heads": heads[False],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in names,
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", default=0, low=0),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", default=0, low=0),
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": _rotated_share(fields, factors, head_dim),
            },
            SLIDING: {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", default=10000.0)},
        },
    }
    if "final_logit_softcapping" in fields:
        found["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    if fields.integer("expert_count", default=0, low=0):
        found |= {
            "enable_moe_block": True,
            "num_experts": fields.integer("expert_count"),
            "top_k_experts": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        }
    return found


def _kv_heads(fields: JsonReader, slides: list[bool], kind: bool) -> int:
    """Of the layers that slide, or of those that do not. Without such layers as of the others."""
    name = "attention.head_count_kv"
    given = fields.data.get(name)
    if not isinstance(given, list):
        return fields.integer(name)
    if len(given) != len(slides):
        raise fields.fail(name, f"one number for each of {len(slides)} layers")
    counts = {count for count, each in zip(given, slides, strict=True) if each is kind} or {*given}
    if len(counts) != 1:
        raise fields.fail(name, "one number for all layers that slide, and one for those that do not")
    return JsonReader({name: counts.pop()}, fields.where).integer(name)


def _rotated_share(fields: JsonReader, factors: list[float] | None, head_dim: int) -> float:
    """The share of a head that is rotated where everything is seen: its frequencies have factors of 1."""
    if factors is None:
        return 1.0
    rotated = next((i for i, factor in enumerate(factors) if factor != 1.0), len(factors))
    if len(factors) != head_dim // 2 or not rotated or any(factor < UNROTATED for factor in factors[rotated:]):
        raise CheckpointError(
            f"{fields.where}: the tensor rope_freqs.weight has other factors than 1 for some of {head_dim // 2} "
            "frequencies and none for the rest"
        )
    return 2 * rotated / head_dim


def gemma4_parts(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """What has other names than elsewhere."""
    found = {ours: whole(tensors.pop(theirs)) for theirs, ours in BARE.items() if theirs in tensors}
    if config.get("enable_moe_block"):
        for theirs in ("ffn_down_exps.weight", "ffn_gate_up_exps.weight"):
            if BARE[theirs] not in found:
                raise missing(theirs, tensors)
    return found
