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
LINEAR, FULL = "linear_attention", "full_attention"
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


def next_parts(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """Of a layer of Qwen3-Next: its projections of each key head are beside one another in Hugging Face's order."""
    if "ssm_a" not in tensors:
        return {}
    key_heads, group, key_dim, value_dim, hidden = _sizes(config)
    keys, values = key_heads * key_dim, key_heads * group * value_dim
    qkv = take(tensors, "attn_qkv.weight", (2 * keys + values, hidden))
    gate = take(tensors, "attn_gate.weight", (values, hidden))
    head = np.arange(key_heads)[:, None]
    within_keys, within_values = np.arange(key_dim), np.arange(group * value_dim)
    rows = [
        head * key_dim + within_keys,
        keys + head * key_dim + within_keys,
        2 * keys + head * group * value_dim + within_values,
        2 * keys + values + head * group * value_dim + within_values,
    ]
    order = np.concatenate(rows, axis=1).reshape(-1)
    return _shared(tensors, config, None) | {
        "linear_attn.in_proj_qkvz.weight": Part((qkv, gate), (order.size, hidden), columns=hidden, rows=order),
        "linear_attn.in_proj_ba.weight": whole(take(tensors, "ssm_ba.weight", (2 * key_heads * group, hidden))),
    }


def plain_parts(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> dict[str, Part]:
    """Of a layer of Qwen3.5."""
    if "ssm_a" not in tensors:
        return {}
    key_heads, group, key_dim, value_dim, hidden = _sizes(config)
    keys, values = key_heads * key_dim, key_heads * group * value_dim
    # Before there are orders of as many rows as the file says.
    qkv = take(tensors, "attn_qkv.weight", (2 * keys + values, hidden))
    gate = take(tensors, "attn_gate.weight", (values, hidden))
    heads, numbers = _tiled(key_heads, group, 1), _tiled(key_heads, group, value_dim)
    order = np.concatenate([np.arange(2 * keys), 2 * keys + numbers])
    head_shape = (key_heads * group, hidden)
    return _shared(tensors, config, numbers) | {
        "linear_attn.in_proj_qkv.weight": in_order(qkv, order),
        "linear_attn.in_proj_z.weight": in_order(gate, numbers),
        "linear_attn.in_proj_b.weight": in_order(take(tensors, "ssm_beta.weight", head_shape), heads),
        "linear_attn.in_proj_a.weight": in_order(take(tensors, "ssm_alpha.weight", head_shape), heads),
    }


def _shared(tensors: dict[str, GgufTensor], config: Mapping[str, Any], tiled: Array | None) -> dict[str, Part]:
    """What both have. tiled: the order of the values' numbers, None where it is Hugging Face's."""
    key_heads, group, key_dim, value_dim, hidden = _sizes(config)
    values, heads = key_heads * group * value_dim, np.arange(key_heads * group)
    if tiled is not None:
        heads = _tiled(key_heads, group, 1)
    channels, width = 2 * key_heads * key_dim + values, config["linear_conv_kernel_dim"]
    conv_order = np.concatenate(
        [np.arange(channels - values), channels - values + (np.arange(values) if tiled is None else tiled)]
    )
    conv = take(tensors, "ssm_conv1d.weight", (channels, width))
    out = take(tensors, "ssm_out.weight", (hidden, values))
    return {
        "linear_attn.A_log": in_order(take(tensors, "ssm_a", heads.shape), heads, change=_decay),
        "linear_attn.dt_bias": in_order(take(tensors, "ssm_dt.bias", heads.shape), heads),
        "linear_attn.conv1d.weight": in_order(conv, conv_order, (channels, 1, width)),
        "linear_attn.norm.weight": whole(take(tensors, "ssm_norm.weight", (value_dim,))),
        "linear_attn.out_proj.weight": in_order(out, np.arange(hidden), column_order=tiled),
    }


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Key heads, value heads of each, the sizes of both kinds of heads, the hidden size."""
    key_heads = config["linear_num_key_heads"]
    return (
        key_heads,
        config["linear_num_value_heads"] // key_heads,
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["hidden_size"],
    )


def _tiled(key_heads: int, group: int, size: int) -> Array:
    """Where llama.cpp has the numbers of the value heads, `size` of each."""
    key, within_group, number = np.indices((key_heads, group, size))
    found: Array = ((within_group * key_heads + key) * size + number).reshape(-1)
    return found


def _decay(numbers: Array) -> Array:
    """A_log of -exp(A_log)."""
    found: Array = np.log(-numbers)
    return found
