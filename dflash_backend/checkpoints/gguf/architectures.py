"""What GGUF calls the fields and tensors of each architecture that is read, and the `config.json` that says the same.

To add an architecture that has Llama's decoder layer: an entry in `ARCHITECTURES`, with the fields and tensors that it
has beyond Llama's; where tensors are joined or turned over, a file that makes `Part`s of a layer's. The family's own
reader then checks the config, as that of any checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dflash_backend.checkpoints.gguf import drafter, gemma4, gpt_oss, hybrids
from dflash_backend.checkpoints.gguf.parts import (
    LayerParts,
    Part,
    in_order,
    odd,
    rotation_of_neighbours,
    whole,
)
from dflash_backend.checkpoints.gguf.reader import GgufModel, GgufTensor
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

# The dtype that the model is served in by default, by what most of its bytes are. Quantised weights were bfloat16.
DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16"}
FROM_QUANTISED = "bfloat16"

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
LAYER = re.compile(r"blk\.(\d{1,6})\.([\w.]+)")
ROPE_FACTORS = "rope_freqs.weight"
MAX_LAYERS = 1 << 14

# Fields after the architecture's name that are read, and those that say what is known without them.
FIELDS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.causal", "attention.sliding_window", "rope.dimension_count"),
    *("rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "expert_count", "expert_used_count", "tensor_data_layout"),
)
EXPERT_FIELDS = ("expert_feed_forward_length",)
# Llama 3.x: the only frequencies that GGUF writes as a tensor, of the kind `llama3`.
LOW_FREQ, HIGH_FREQ, LLAMA3_POSITIONS = 1.0, 4.0, (8192, 4096, 2048, 16384, 32768, 65536, 131072)
ROPE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Architecture:
    """One architecture. name, model_type: those of Hugging Face's config. permuted: the rows of queries and keys are in
    the order of a rotation of neighbours, which our rotation of halves is not. parts: its tensors beyond Llama's.
    experts: it has a mixture of experts in place of the MLP, a matrix for each projection of each. fields: that are
    read beyond Llama's. layer_parts: makes what is not a tensor as it is. centred: norms that are kept with a 1 that
    the model adds. outer, prefix: tensors of no layer, and what the names of all begin with. some_rotated, windows: a
    part of a head may be rotated, layers may have a window."""

    name: str
    model_type: str
    permuted: bool = False
    parts: tuple[tuple[str, str], ...] = ()
    experts: bool = False
    fields: tuple[str, ...] = ()
    layer_parts: LayerParts = lambda tensors, config: {}
    centred: tuple[str, ...] = ()
    outer: tuple[tuple[str, str], ...] = tuple(OUTER.items())
    prefix: str = "model."
    some_rotated: bool = False
    windows: bool = False

    @property
    def is_drafter(self) -> bool:
        """Whether it is no target: then its tokens are the target's."""
        return self.model_type == drafter.NAME


def _hybrid(name: str, model_type: str, experts: bool, is_grouped: bool = False) -> Architecture:
    return Architecture(
        name,
        model_type,
        parts=tuple((QK_NORMS | ROUTER | hybrids.PARTS).items()),
        experts=experts,
        fields=hybrids.FIELDS + EXPERT_FIELDS,
        layer_parts=partial(hybrids.delta_net_parts, is_grouped),
        centred=hybrids.CENTRED,
        some_rotated=True,
    )


ARCHITECTURES = {
    # Mistral's models too, up to 7B v0.3 and Nemo: llama.cpp's converter calls them so.
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", parts=tuple(QK_NORMS.items())),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        parts=tuple((QK_NORMS | ROUTER).items()),
        experts=True,
        fields=EXPERT_FIELDS,
    ),
    "qwen3next": _hybrid("Qwen3NextForCausalLM", "qwen3_next", experts=True, is_grouped=True),
    "qwen35": _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", experts=False),
    "qwen35moe": _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", experts=True),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        parts=tuple(gpt_oss.PARTS.items()),
        fields=EXPERT_FIELDS,
        layer_parts=gpt_oss.gpt_oss_parts,
        windows=True,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        parts=tuple((QK_NORMS | gemma4.PARTS).items()),
        fields=gemma4.FIELDS,
        layer_parts=gemma4.gemma4_parts,
        some_rotated=True,
        windows=True,
    ),
    drafter.NAME: Architecture(
        drafter.ARCHITECTURE,
        drafter.NAME,
        parts=tuple(QK_NORMS.items()),
        fields=drafter.FIELDS,
        layer_parts=drafter.drafter_parts,
        outer=tuple(drafter.OUTER.items()),
        prefix="",
        windows=True,
    ),
}


def read_architecture(model: GgufModel) -> Architecture:
    """The architecture that a file names. Raises `CheckpointError` for one that is not read."""
    name = model.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{model.path}: general.architecture is {shown(name)}; of GGUF this server reads {', '.join(ARCHITECTURES)}"
        )
    return found


def read_config(model: GgufModel, rope_factors: list[float] | None) -> dict[str, Any]:
    """What `config.json` says of the same model. rope_factors: the numbers of the tensor `ROPE_FACTORS`, if there.
    Raises `CheckpointError`."""
    architecture = read_architecture(model)
    fields = _fields(model)
    hidden, heads = fields.integer("embedding_length"), _same(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", default=max(1, hidden // heads))
    if "attention.key_length" not in fields and hidden % heads:
        raise fields.fail("embedding_length", f"a multiple of attention.head_count ({heads})")
    for field in ("attention.value_length", *(() if architecture.some_rotated else ("rope.dimension_count",))):
        if fields.integer(field, default=head_dim) != head_dim:
            raise fields.fail(field, f"{head_dim}, the size of a head")
    positions = fields.integer("context_length")
    _check_unlike(fields, positions, architecture)
    theta = fields.number("rope.freq_base", default=10000.0)
    own_heads = architecture.model_type == "gemma4_text"  # of two kinds, and with factors of its own
    scaling = {} if own_heads else _rope_scaling(fields, theta, head_dim, rope_factors)
    inner = fields.integer("expert_feed_forward_length") if "expert_feed_forward_length" in fields else None
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count", high=MAX_LAYERS),
        "intermediate_size": _same(fields, "feed_forward_length", inner),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if own_heads else _same(fields, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_theta": theta} | scaling,
        "attention_bias": architecture.permuted and "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "dtype": _dtype(model),
    }
    if not architecture.is_drafter:
        if "token_embd.weight" not in model.tensors:
            raise CheckpointError(f"{model.path} has no tensor token_embd.weight")
        config |= {
            "vocab_size": model.tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in model.tensors,
        }
    if architecture.experts:
        config |= {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp does so whatever the file says: no field is about it
        }
    return config | _own_config(model, fields, config, rope_factors)


def _own_config(
    model: GgufModel, fields: JsonReader, config: dict[str, Any], rope_factors: list[float] | None
) -> dict[str, Any]:
    """What an architecture has beyond Llama's, or otherwise."""
    model_type = config["model_type"]
    if model_type == drafter.NAME:
        return drafter.read_drafter(model, fields, config) | {"model_type": "qwen3"}
    if model_type == "gemma4_text":
        return gemma4.read_gemma4(fields, config, frozenset(model.tensors), rope_factors)
    if model_type == "gpt_oss":
        return gpt_oss.read_gpt_oss(fields, config, model.tensors)
    return hybrids.read_hybrid(fields, config) if read_architecture(model).centred else {}


def unknown_fields(model: GgufModel) -> list[str]:
    """The fields of the architecture's own that are not read."""
    prefix = f"{model.metadata['general.architecture']}."
    known = FIELDS + read_architecture(model).fields
    return sorted(name for name in model.metadata if name.startswith(prefix) and name[len(prefix) :] not in known)


def read_parts(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Part]:
    """The tensors of the converted checkpoint by Hugging Face's names. Raises `CheckpointError` on a tensor of the file
    that no such architecture has."""
    architecture = read_architecture(model)
    outer, parts = dict(architecture.outer), dict[str, Part]()
    layers: dict[int, dict[str, GgufTensor]] = {}
    for tensor in model.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        match = LAYER.fullmatch(tensor.name)
        if tensor.name in outer:
            parts[outer[tensor.name]] = _norm_or_whole(architecture, tensor.name, tensor)
        elif match:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            raise _unknown(tensor, model)
    num_layers = config["num_hidden_layers"]
    # Layers that draft the model's next tokens come last.
    last = _fields(model).integer("block_count")
    if any(i not in layers for i in range(num_layers)) or any(i >= last for i in layers):
        raise CheckpointError(f"{model.path}: block_count is {last}, and tensors of {len(layers)} layers are there")
    for i, tensors in sorted(layers.items()):
        if i < num_layers:
            prefix = f"{architecture.prefix}layers.{i}."
            parts |= {prefix + name: part for name, part in architecture.layer_parts(tensors, config).items()}
            for name, tensor in tensors.items():
                parts |= {prefix + ours: part for ours, part in _own_parts(model, config, name, tensor).items()}
    return parts


def _own_parts(model: GgufModel, config: Mapping[str, Any], name: str, tensor: GgufTensor) -> dict[str, Part]:
    """What a tensor of a layer becomes by itself. name: after the layer's."""
    architecture = read_architecture(model)
    stem, _, kind = name.rpartition(".")
    names, head_dim = PARTS | dict(architecture.parts), config["head_dim"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if kind == "weight" and architecture.experts and stem in EXPERTS:
        if len(tensor.shape) != 3 or tensor.shape[0] != config["num_experts"]:
            raise odd(tensor, f"one matrix for each of {config['num_experts']} experts")
        size = math.prod(tensor.shape[1:])
        return {
            f"mlp.experts.{i}.{EXPERTS[stem]}.weight": Part((tensor,), tensor.shape[1:], i * size)
            for i in range(tensor.shape[0])
        }
    if kind not in ("weight", "bias") or stem not in names:
        raise _unknown(tensor, model)
    if architecture.permuted and stem in heads:
        if tensor.shape[0] != heads[stem] * head_dim or head_dim % 2:
            raise odd(tensor, f"{heads[stem]} times {head_dim} rows, of heads of an even size")
        part = in_order(tensor, rotation_of_neighbours(np.arange(tensor.shape[0]), head_dim))
    else:
        part = _norm_or_whole(architecture, name, tensor)
    return {f"{names[stem]}.{kind}": part}


def _norm_or_whole(architecture: Architecture, name: str, tensor: GgufTensor) -> Part:
    if name.removesuffix(".weight") in architecture.centred:
        # The model adds the 1 that GGUF holds.
        return Part((tensor,), tensor.shape, change=lambda numbers: numbers - np.float32(1))
    # A row of one number is a vector to some writers.
    return whole(tensor, (1, *tensor.shape) if len(tensor.shape) == 1 and name.endswith("inp_shexp.weight") else None)


def _unknown(tensor: GgufTensor, model: GgufModel) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: the tensor {shown(tensor.name)} is none that {model.metadata['general.architecture']} "
        "is known to have here; leaving it out would change the model's answers"
    )


def _fields(model: GgufModel) -> JsonReader:
    """The fields of the architecture's own, without its name before them."""
    name = model.metadata["general.architecture"]
    fields = {key[len(name) + 1 :]: value for key, value in model.metadata.items() if key.startswith(f"{name}.")}
    return JsonReader(fields, f"{model.path}: {name}")


def _same(fields: JsonReader, field: str, default: int | None = None) -> int:
    """A number that may be given for each layer, where it must be the same for all."""
    value = fields.data.get(field)
    if not isinstance(value, list):
        return fields.integer(field, default=default)
    if len(set(value)) != 1:
        raise fields.fail(field, "the same number for all layers: layers of several shapes are not read from GGUF")
    return JsonReader({field: value[0]}, fields.where).integer(field)


def _check_unlike(fields: JsonReader, positions: int, architecture: Architecture) -> None:
    """Refuse what the architecture's name covers in llama.cpp and the family's decoder here does not do."""
    if not architecture.is_drafter and not fields.boolean("attention.causal", default=True):
        raise fields.fail("attention.causal", "true")
    window = fields.integer("attention.sliding_window", default=0, low=0)
    if 0 < window < positions and not architecture.windows:
        raise fields.fail("attention.sliding_window", "none: which layers have it, this format does not say")
    may_have = architecture.experts or EXPERT_FIELDS[0] in architecture.fields
    if not may_have and fields.integer("expert_count", default=0, low=0):
        raise fields.fail("expert_count", f"0: {architecture.name} has no experts here")


def _dtype(model: GgufModel) -> str:
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        dtype = DTYPES.get(tensor.kind, FROM_QUANTISED)
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope_scaling(fields: JsonReader, theta: float, head_dim: int, factors: list[float] | None) -> dict[str, Any]:
    """How the frequencies are scaled, as `rope_parameters` says it."""
    kind = fields.string("rope.scaling.type", default="linear" if "rope.scale_linear" in fields else "none")
    factor = fields.number("rope.scaling.factor", default=fields.number("rope.scale_linear", default=1.0))
    if fields.number("rope.scaling.attn_factor", default=1.0) != 1.0:
        raise fields.fail("rope.scaling.attn_factor", "1: another scale of attention is not read from GGUF")
    if factors is not None:
        if kind not in ("none", "linear") or (kind == "linear" and factor != 1.0):
            raise fields.fail("rope.scaling.type", f"none beside the tensor {ROPE_FACTORS}")
        return _llama3(fields, factors, theta, head_dim)
    if kind in ("none", "linear"):
        return (
            {"rope_type": "default"} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}
        )
    if kind != "yarn":
        raise fields.fail("rope.scaling.type", "none, linear or yarn; other scaling is not read from GGUF")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", default=1.0),
    }


def _llama3(fields: JsonReader, factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 whose factors these are: the length before scaling is not in the file but is found by
    trying those that models have."""
    factor = max(factors, default=0.0)
    usable = len(factors) == head_dim // 2 and math.isfinite(factor) and factor >= 1
    for original in LLAMA3_POSITIONS if usable else ():
        expected = [_llama3_factor(theta ** (2 * i / head_dim), factor, original) for i in range(head_dim // 2)]
        if all(math.isclose(one, other, rel_tol=ROPE_TOLERANCE) for one, other in zip(factors, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW_FREQ,
                "high_freq_factor": HIGH_FREQ,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{fields.where}: the tensor {ROPE_FACTORS} has other factors than Llama 3.1's scaling gives for a head of "
        f"{head_dim}, theta {theta:g} and {', '.join(map(str, LLAMA3_POSITIONS))} positions before scaling"
    )


def _llama3_factor(period: float, factor: float, original: int) -> float:
    """By how much a frequency is divided. period: positions of a turn, over 2 pi."""
    length = 2 * math.pi * period
    if length < original / HIGH_FREQ:
        return 1.0
    if length > original / LOW_FREQ:
        return factor
    smooth = (original / length - LOW_FREQ) / (HIGH_FREQ - LOW_FREQ)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
