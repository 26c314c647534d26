"""A checkpoint of Hugging Face's format as GGUF, written as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, Any]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    # of drafters
    "model.fc.weight": "fc.weight",
    "model.hidden_norm.weight": "enc.output_norm.weight",
    "model.lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router": "ffn_gate_inp",
}
# Where an architecture has other names, whole or without what follows the last point.
OWN_NAMES = {
    **{
        name: {"post_attention_layernorm": "post_attention_norm"}
        for name in ("qwen3next", "qwen35", "qwen35moe", "gpt-oss")
    },
    "gemma4": {
        "layer_scalar": "layer_output_scale.weight",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        **{f"post_feedforward_layernorm{x}": f"post_ffw_norm{x}" for x in ("", "_1", "_2")},
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.down_proj": "ffn_down_exps.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    },
}
CENTRED = ("qwen3next", "qwen35", "qwen35moe")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Bytes as byte-level vocabularies spell them: the printable ones as they are.
BYTES = [chr(b) if 33 <= b <= 126 else chr(256 + b) for b in range(256)]


def as_converter(
    tensors: Mapping[str, Array],
    heads: Mapping[str, int],
    architecture: str = "",
    config: Mapping[str, Any] | None = None,
) -> dict[str, Array]:
    """The tensors by GGUF's names. heads: of `q_proj` and `k_proj` where their rows change places."""
    if config is not None:
        tensors = changed(tensors, architecture, config)
    parts = PARTS | OWN_NAMES.get(architecture, {})
    found: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    for name, tensor in sorted(tensors.items()):
        if name in NAMES:
            found[NAMES[name]] = tensor
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        part, _, kind = rest.rpartition(".")
        if part.startswith("mlp.experts."):
            experts.setdefault(f"blk.{layer}.ffn_{part.split('.')[-1].removesuffix('_proj')}_exps.weight", []).append(
                tensor
            )
            continue
        if heads and part in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads[part.split(".")[1]]
            turned = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            tensor = turned.swapaxes(1, 2).reshape(tensor.shape)
        if rest.startswith("gguf:"):
            found[f"blk.{layer}.{rest.removeprefix('gguf:')}"] = tensor
        elif rest in parts:
            found[f"blk.{layer}.{parts[rest]}"] = tensor
        else:
            found[f"blk.{layer}.{parts[part]}.{kind}"] = tensor
    return found | {name: np.stack(each) for name, each in experts.items()}


def changed(tensors: Mapping[str, Array], architecture: str, config: Mapping[str, Any]) -> dict[str, Array]:
    """Tensors as llama.cpp's converter changes them; `gguf:` is before names that it gives them after the layer's."""
    found: dict[str, Array] = {}
    for name, tensor in tensors.items():
        before, _, last = name.partition("linear_attn.")
        if last and architecture in CENTRED:
            made = _delta_net(last, tensor, architecture, config)
            found |= {f"{before}gguf:{new}": value for new, value in made.items()}
        elif name.endswith("norm.weight") and architecture in CENTRED:
            found[name] = tensor + np.float32(1)
        elif architecture == "gpt-oss" and ".experts." in name:
            before, _, last = name.partition("mlp.experts.")
            found |= {f"{before}gguf:{new}": value for new, value in _gpt_oss_experts(last, tensor).items()}
        elif name.endswith("self_attn.sinks"):
            found[name.replace("self_attn.sinks", "gguf:attn_sinks.weight")] = tensor
        else:
            found[name] = tensor
    return found


def _gpt_oss_experts(name: str, tensor: Array) -> dict[str, Array]:
    if name == "down_proj":
        return {"ffn_down_exps.weight": tensor.swapaxes(1, 2)}
    if name == "down_proj_bias":
        return {"ffn_down_exps.bias": tensor}
    kind = "bias" if name.endswith("bias") else "weight"
    halves = [tensor[..., i::2] if kind == "bias" else tensor[..., i::2].swapaxes(1, 2) for i in (0, 1)]
    return {f"ffn_{part}_exps.{kind}": half for part, half in zip(("gate", "up"), halves, strict=True)}


def _delta_net(name: str, tensor: Array, architecture: str, config: Mapping[str, Any]) -> dict[str, Array]:
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    group, key_dim, value_dim = values // heads, config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tiled(rows: Array, size: int) -> Array:
        if architecture == "qwen3next":
            return rows
        return rows.reshape(heads, group, size, -1).swapaxes(0, 1).reshape(rows.shape)

    keys = 2 * heads * key_dim
    if name == "in_proj_qkvz.weight":
        cuts = np.cumsum([key_dim, key_dim, group * value_dim])
        q, k, v, z = np.split(tensor.reshape(heads, -1, tensor.shape[-1]), cuts, axis=1)
        hidden = tensor.shape[-1]
        qkv = np.concatenate([part.reshape(-1, hidden) for part in (q, k, v)])
        return {"attn_qkv.weight": qkv, "attn_gate.weight": z.reshape(-1, hidden)}
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor.reshape(tensor.shape[0], -1)
        new = "attn_qkv.weight" if name.startswith("in_proj") else "ssm_conv1d.weight"
        return {new: np.concatenate([tensor[:keys], tiled(tensor[keys:], value_dim)])}
    with np.errstate(all="ignore"):
        return {
            "in_proj_z.weight": lambda: {"attn_gate.weight": tiled(tensor, value_dim)},
            "in_proj_ba.weight": lambda: {"ssm_ba.weight": tensor},
            "in_proj_b.weight": lambda: {"ssm_beta.weight": tiled(tensor, 1)},
            "in_proj_a.weight": lambda: {"ssm_alpha.weight": tiled(tensor, 1)},
            "A_log": lambda: {"ssm_a": tiled(-np.exp(tensor), 1)},
            "dt_bias": lambda: {"ssm_dt.bias": tiled(tensor, 1)},
            "norm.weight": lambda: {"ssm_norm.weight": tensor},
            "out_proj.weight": lambda: {"ssm_out.weight": np.ascontiguousarray(tiled(tensor.T, value_dim).T)},
        }[name]()


def write_own_fields(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    """The fields that an architecture has beyond Llama's."""
    if architecture in CENTRED:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_array(f"{architecture}.attention.recurrent_layers", [t[0] == "l" for t in config["layer_types"]])
        writer.add_rope_dimension_count(
            int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 0.25))
        )
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        rope = config["rope_parameters"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "dflash":
        own = config["dflash_config"]
        writer.add_uint32("dflash.block_size", config["block_size"])
        writer.add_array("dflash.target_layers", [i + 1 for i in own["target_layer_ids"]])
        writer.add_uint32("tokenizer.ggml.mask_token_id", own["mask_token_id"])
        if "causal" in own:
            writer.add_causal_attention(own["causal"])
        if config.get("use_sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
            writer.add_array("dflash.attention.sliding_window_pattern", [t[0] == "s" for t in config["layer_types"]])
    if architecture == "gemma4":
        full = next(iter(config["per_layer_config"].values()))
        slides = [kind[0] == "s" for kind in config["layer_types"]]
        for name in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base"):
            writer.kv_data[0].pop(f"gemma4.{name}", None)
        writer.add_head_count_kv(
            [config["num_key_value_heads"] if each else full["num_key_value_heads"] for each in slides]
        )
        writer.add_key_length(full["head_dim"])
        writer.add_value_length(full["head_dim"])
        writer.add_uint32("gemma4.attention.key_length_swa", config["head_dim"])
        writer.add_uint32("gemma4.attention.value_length_swa", config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_float32("gemma4.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_array("gemma4.attention.sliding_window_pattern", slides)
        writer.add_uint32("gemma4.attention.shared_kv_layers", config["num_kv_shared_layers"])
        writer.add_uint32("gemma4.embedding_length_per_layer_input", config["hidden_size_per_layer_input"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The model's fields."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config).get("rope_theta", 10000.0))
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(
            config["num_experts_per_tok" if "num_experts_per_tok" in config else "top_k_experts"]
        )
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of `size` tokens: bytes as far as they go, one merge, and a token that ends an answer."""
    tokens = [*("abcdefghijklmnopqrstuvwxyz"), *[b for b in BYTES if not b.islower() or not b.isascii()]][: size - 2]
    tokens += [f"[PAD{i}]" for i in range(size - 2 - len(tokens))] + ["ab", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (size - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def write_gguf(
    path: Path,
    source: Path,
    architecture: str,
    *,
    kind: str | None = None,
    block: Callable[[str, Array], tuple[Array, str] | None] = lambda name, tensor: None,
    fields: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: Mapping[str, Array] | None = None,
    **options: Any,
) -> dict[str, Array]:
    """Write the checkpoint in `source`; returns the tensors as they are in the file. kind: of the matrices, which the
    library can write. block: bytes and type of a tensor. fields, extra: more of both. options: of the writer."""
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = load_file(source / "model.safetensors")
    if architecture == "dflash":
        tensors = as_converter({f"model.{name}": tensor for name, tensor in stored.items()}, {}, architecture)
    else:
        tensors = as_converter(stored, heads if architecture == "llama" else {}, architecture, config)
    if architecture == "gemma4":
        rotated = next(iter(config["per_layer_config"].values()))["head_dim"] // 8
        tensors["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (3 * rotated), "f4")
    writer = gguf.GGUFWriter(path, architecture, **options)
    write_fields(writer, config)
    write_own_fields(writer, architecture, config)
    write_vocabulary(writer, config["vocab_size"])
    fields(writer)
    for name, tensor in (tensors | dict(extra or {})).items():
        given = block(name, tensor)
        if given is None and kind is not None and tensor.ndim > 1:
            given = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[kind]), kind
        if given is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, given[0], raw_dtype=gguf.GGMLQuantizationType[given[1]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
