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
}
EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Bytes as byte-level vocabularies spell them: the printable ones as they are.
BYTES = [chr(b) if 33 <= b <= 126 else chr(256 + b) for b in range(256)]


def as_converter(tensors: Mapping[str, Array], heads: Mapping[str, int]) -> dict[str, Array]:
    """The tensors by GGUF's names. heads: of `q_proj` and `k_proj` where their rows change places."""
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
        found[f"blk.{layer}.{PARTS[part]}.{kind}"] = tensor
    return found | {name: np.stack(each) for name, each in experts.items()}


def write_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The model's fields."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of `size` tokens: bytes as far as they go, one merge, and a token that ends an answer."""
    tokens = [*("abcdefghijklmnopqrstuvwxyz"), *[b for b in BYTES if not b.islower() or not b.isascii()]][: size - 2]
    tokens += ["ab", "<|im_end|>"]
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
    tensors = as_converter(load_file(source / "model.safetensors"), heads if architecture == "llama" else {})
    writer = gguf.GGUFWriter(path, architecture, **options)
    write_fields(writer, config)
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
