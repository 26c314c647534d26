"""Qwen3-Next and Qwen3.5 in GGUF: gated delta nets, whose heads llama.cpp orders and whose numbers it changes.

Norms are kept with the 1 that the model adds, and the decay as -exp(A_log). A head of values follows its head of keys
in Hugging Face's order; llama.cpp has Qwen3.5's first value heads of all key heads first, then the second ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_backend.checkpoints.gguf.parts import Array, Part, in_order, take, whole
from dflash_backend.checkpoints.gguf.reader import GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import FULL, LINEAR

FIELDS = (
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
    *("attention.recurrent_layers", "full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
    "expert_shared_feed_forward_length",
)
PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
CENTRED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
INTERVAL = 4


def read_hybrid(fields: JsonReader, config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of the layers. Raises `CheckpointError`."""
    value_heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if inner % value_heads:
        raise fields.fail("ssm.inner_size", f"a multiple of ssm.time_step_rank ({value_heads})")
    num_layers = config["num_hidden_layers"] - fields.integer("nextn_predict_layers", default=0, low=0)
    head_dim = config["head_dim"]
    rotated = fields.integer("rope.dimension_count", default=head_dim, high=head_dim)
    found = {
        "num_hidden_layers": num_layers,
        "layer_types": _layer_types(fields, num_layers),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": rotated / head_dim},
    }
    if "num_experts" in config:
        found["shared_expert_intermediate_size"] = fields.integer("expert_shared_feed_forward_length")
    return found


def _layer_types(fields: JsonReader, num_layers: int) -> list[str]:
    recurrent = fields.data.get("attention.recurrent_layers")
    if recurrent is None:
        interval = fields.integer("full_attention_interval", default=INTERVAL)
        return [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if not isinstance(recurrent, list) or len(recurrent) < num_layers or not {*recurrent} <= {True, False}:
        raise fields.fail("attention.recurrent_layers", f"true or false for each of {num_layers} layers")
    return [LINEAR if each else FULL for each in recurrent[:num_layers]]


def delta_net_parts(is_grouped: bool, tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """Of a layer that is a gated delta net. is_grouped: as in Qwen3-Next, whose projections of each key head are beside
    one another in Hugging Face's order."""
    if "ssm_a" not in tensors:
        return {}
    key_heads, num_heads, hidden = (
        config[name] for name in ("linear_num_key_heads", "linear_num_value_heads", "hidden_size")
    )
    key_dim, value_dim, width = (config[f"linear_{name}_dim"] for name in ("key_head", "value_head", "conv_kernel"))
    keys, values, group = key_heads * key_dim, num_heads * value_dim, num_heads // key_heads
    # Before there are orders of as many rows as the file says.
    qkv = take(tensors, "attn_qkv.weight", (2 * keys + values, hidden))
    gate = take(tensors, "attn_gate.weight", (values, hidden))
    heads, numbers = np.arange(num_heads), np.arange(values)
    if not is_grouped:
        heads, numbers = _tiled(key_heads, group, 1), _tiled(key_heads, group, value_dim)
    order = np.concatenate([np.arange(2 * keys), 2 * keys + numbers])
    conv = take(tensors, "ssm_conv1d.weight", (2 * keys + values, width))
    out = take(tensors, "ssm_out.weight", (hidden, values))
    found = {
        "linear_attn.A_log": in_order(take(tensors, "ssm_a", (num_heads,)), heads, change=lambda decay: np.log(-decay)),
        "linear_attn.dt_bias": in_order(take(tensors, "ssm_dt.bias", (num_heads,)), heads),
        "linear_attn.conv1d.weight": in_order(conv, order, (2 * keys + values, 1, width)),
        "linear_attn.norm.weight": whole(take(tensors, "ssm_norm.weight", (value_dim,))),
        "linear_attn.out_proj.weight": in_order(out, np.arange(hidden), column_order=None if is_grouped else numbers),
    }
    if not is_grouped:
        beta, alpha = (take(tensors, f"ssm_{name}.weight", (num_heads, hidden)) for name in ("beta", "alpha"))
        return found | {
            "linear_attn.in_proj_qkv.weight": in_order(qkv, order),
            "linear_attn.in_proj_z.weight": in_order(gate, numbers),
            "linear_attn.in_proj_b.weight": in_order(beta, heads),
            "linear_attn.in_proj_a.weight": in_order(alpha, heads),
        }
    head, of_keys, of_values = np.arange(key_heads)[:, None], np.arange(key_dim), np.arange(group * value_dim)
    rows = [
        head * key_dim + of_keys,
        keys + head * key_dim + of_keys,
        2 * keys + head * group * value_dim + of_values,
        2 * keys + values + head * group * value_dim + of_values,
    ]
    order = np.concatenate(rows, axis=1).reshape(-1)
    return found | {
        "linear_attn.in_proj_qkvz.weight": Part((qkv, gate), (order.size, hidden), columns=hidden, rows=order),
        "linear_attn.in_proj_ba.weight": whole(take(tensors, "ssm_ba.weight", (2 * num_heads, hidden))),
    }


def _tiled(key_heads: int, group: int, size: int) -> Array:
    """Where llama.cpp has the numbers of the value heads, `size` of each."""
    key, within_group, number = np.indices((key_heads, group, size))
    found: Array = ((within_group * key_heads + key) * size + number).reshape(-1)
    return found
