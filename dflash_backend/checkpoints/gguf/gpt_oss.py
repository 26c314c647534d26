"""gpt-oss in GGUF: the experts' gates and ups are apart, and all their matrices are turned over.

In MXFP4 they are rows of outputs here and in OpenAI's checkpoints alike, so that a row keeps its codes and scales. ggml
has the scale's byte and then the codes of 32 numbers, the first 16 in the lower halves of 16 bytes; OpenAI has scales
in a tensor of their own, and neighbours in a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_backend.checkpoints.experts import MXFP4, MXFP4_GROUP
from dflash_backend.checkpoints.gguf.parts import Array, Part, take, whole
from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader

PARTS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
# llama.cpp's constants; no field is about them.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
GGML_MXFP4, BLOCK_BYTES = "MXFP4", 17


def read_gpt_oss(fields: JsonReader, config: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """What `config.json` says of windows and experts. Every second layer has a window, the first among them. tensors:
    those of the file; experts stay in MXFP4 where all are. Raises `CheckpointError`."""
    rope = config["rope_parameters"]
    kinds = {tensor.kind for name, tensor in tensors.items() if name.endswith("_exps.weight")}
    return ({"quantization_config": {"quant_method": MXFP4}} if kinds == {GGML_MXFP4} else {}) | {
        "sliding_window": fields.integer("attention.sliding_window"),
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
        "attention_bias": True,
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def gpt_oss_parts(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """The experts of a layer and the sinks of its heads."""
    count, inner, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    gate, up = (take(tensors, f"ffn_{name}_exps.weight", (count, inner, hidden)) for name in ("gate", "up"))
    biases = tuple(take(tensors, f"ffn_{name}_exps.bias", (count, inner)) for name in ("gate", "up"))
    down = take(tensors, "ffn_down_exps.weight", (count, hidden, inner))
    # A gate, then its up, of each expert in turn.
    rows = (np.arange(count * inner)[:, None] + np.array([0, count * inner])).reshape(-1)
    if "quantization_config" in config:
        matrices = _packed("mlp.experts.gate_up_proj", (gate, up), (count, 2 * inner, hidden), rows)
        matrices |= _packed("mlp.experts.down_proj", (down,), (count, hidden, inner), np.arange(count * hidden))
    else:
        matrices = {
            "mlp.experts.gate_up_proj": Part(
                (gate, up), (count, hidden, 2 * inner), columns=hidden, rows=rows, matrix_rows=2 * inner
            ),
            "mlp.experts.down_proj": Part(
                (down,), (count, inner, hidden), columns=inner, rows=np.arange(count * hidden), matrix_rows=hidden
            ),
        }
    return matrices | {
        "mlp.experts.gate_up_proj_bias": Part(biases, (count, 2 * inner), columns=1, rows=rows),
        "mlp.experts.down_proj_bias": whole(take(tensors, "ffn_down_exps.bias", (count, hidden))),
        "self_attn.sinks": whole(take(tensors, "attn_sinks.weight", (config["num_attention_heads"],))),
    }


def _packed(name: str, sources: tuple[GgufTensor, ...], shape: tuple[int, ...], rows: Array) -> dict[str, Part]:
    """The blocks and scales of experts in MXFP4 whose numbers are of this shape, rows of outputs."""
    *before, columns = shape
    groups = (*before, columns // MXFP4_GROUP)
    return {
        f"{name}_blocks": Part(
            sources, (*groups, MXFP4_GROUP // 2), columns=columns, rows=rows, repack=_neighbours_in_bytes
        ),
        f"{name}_scales": Part(sources, groups, columns=columns, rows=rows, repack=_scales),
    }


def _scales(rows: Array) -> Array:
    """The scales of rows of ggml's blocks, uint8 `[num_rows, num_bytes]`: `[num_rows, groups]`."""
    return rows[:, ::BLOCK_BYTES]


def _neighbours_in_bytes(rows: Array) -> Array:
    """The codes of rows of ggml's blocks, uint8 `[num_rows, num_bytes]`, two neighbours in a byte and the first of them
    in its lower half: `[num_rows, groups, 16]`."""
    octets = rows.reshape(len(rows), -1, BLOCK_BYTES)[..., 1:]
    codes = np.concatenate([octets & 0x0F, octets >> 4], axis=-1)
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed
