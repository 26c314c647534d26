"""gpt-oss in GGUF: the experts' gates and ups are apart, and all their matrices are turned over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_backend.checkpoints.gguf.parts import Part, take, whole
from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader

PARTS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
# llama.cpp's constants; no field is about them.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def read_gpt_oss(fields: JsonReader, config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of windows and experts. Every second layer has a window, the first among them. Raises
    `CheckpointError`."""
    rope = config["rope_parameters"]
    return {
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
    return {
        "mlp.experts.gate_up_proj": Part(
            (gate, up), (count, hidden, 2 * inner), columns=hidden, rows=rows, matrix_rows=2 * inner
        ),
        "mlp.experts.gate_up_proj_bias": Part(biases, (count, 2 * inner), columns=1, rows=rows),
        "mlp.experts.down_proj": Part(
            (down,), (count, inner, hidden), columns=inner, rows=np.arange(count * hidden), matrix_rows=hidden
        ),
        "mlp.experts.down_proj_bias": whole(take(tensors, "ffn_down_exps.bias", (count, hidden))),
        "self_attn.sinks": whole(take(tensors, "attn_sinks.weight", (config["num_attention_heads"],))),
    }
