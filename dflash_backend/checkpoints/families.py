"""The target architectures that this server runs: one entry each in `FAMILIES`.

For a family that has the decoder layer of `models/layers.py`, under the tensor names that Hugging Face checkpoints
share, no other code is needed (docs/architecture.md lists its tests and names): the entry says in what the layer
differs from Llama's, and how the family's config class reads `config.json`. A field that is missing there takes the
value that `transformers` 5 gives it, so that a checkpoint means the same here and there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dflash_backend.checkpoints.experts import (
    gemma4_experts,
    gpt_oss_experts,
    qwen35_experts,
    qwen_moe_experts,
    qwen_next_experts,
)
from dflash_backend.checkpoints.gemma4 import UNIFIED_WINDOW, gemma4_windows, read_gemma4
from dflash_backend.checkpoints.hybrids import read_delta_net
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.rope import DEFAULT_ROPE, attention_factor_of
from dflash_backend.checkpoints.spec import FULL, SLIDING, DeltaNetSpec, Gemma4Spec, MoeSpec, RopeSpec


@dataclass(frozen=True)
class Family:
    """One architecture.

    qk_norm: an RMSNorm on every query and key head before the rotation. qkv_bias: biases on the query, key and value
    projections in any case. sinks: a learned logit of each query head in its softmax. windows: reads the sliding window
    of each layer. experts: reads a mixture of experts, in place of the MLP in the layers that the config says.
    num_kv_heads, head_dim, max_positions, rms_norm_eps, attention_bias: what missing fields mean; None where it follows
    from the hidden size and the query heads. rope: the rotary embedding where no field is about it; its theta where
    none gives it. reads_attention_bias, reads_mlp_bias: whether the fields `attention_bias` (all four projections of
    attention) and `mlp_bias` count. delta_net: reads which layers are gated delta nets, and their sizes.
    gemma4: reads what Gemma 4 has of its own. attention_gate, centred_norms: as in `DecoderSpec`. activation: of the
    MLP, the field that names it and the names it may have; missing, it is the first. tied: whether the head is the
    embedding where no field says it. rotary_share: the share of a head that is rotated where no field
    says it.
    """

    windows: Callable[[JsonReader, int], tuple[int | None, ...]]
    qk_norm: bool = False
    qkv_bias: bool = False
    sinks: bool = False
    experts: Callable[[JsonReader, int], MoeSpec | None] | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    rms_norm_eps: float = 1e-6
    rope: RopeSpec = DEFAULT_ROPE
    reads_attention_bias: bool = False
    attention_bias: bool = False
    reads_mlp_bias: bool = False
    delta_net: Callable[[JsonReader, int], DeltaNetSpec] | None = None
    gemma4: Callable[[JsonReader, int, int], Gemma4Spec] | None = None
    attention_gate: bool = False
    centred_norms: bool = False
    rotary_share: float = 1.0
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    tied: bool = False


def no_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """Llama: every layer sees everything."""
    return _agreeing(config, (None,) * num_layers)


def hybrid_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen3-Next and Qwen3.5: the layers that have attention see everything; `hybrids.py` reads `layer_types`."""
    return (None,) * num_layers


def mistral_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: `sliding_window` in all layers unless it is null; 4096 where the field is missing."""
    return _agreeing(config, (_window(config, 4096),) * num_layers)


def qwen_moe_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen3-MoE: `sliding_window` in all layers with `use_sliding_window`."""
    return _agreeing(config, (_qwen_window(config),) * num_layers)


def gpt_oss_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """gpt-oss: `sliding_window` in the layers that `layer_types` calls sliding, without it in every second layer from
    the first on; 128 where the field is missing."""
    window = _window(config, 128)
    types = config.layer_types(num_layers, FULL, SLIDING) or tuple((SLIDING, FULL)[i % 2] for i in range(num_layers))
    if SLIDING in types and window is None:
        raise config.fail("sliding_window", f"a number of positions for the layers of '{SLIDING}'")
    return tuple(window if name == SLIDING else None for name in types)


def qwen_windows(config: JsonReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen2 and Qwen3: `sliding_window` in the layers that `layer_types` calls sliding, without it in those from
    `max_window_layers` on; none of it without `use_sliding_window`."""
    window = _qwen_window(config)
    types = config.layer_types(num_layers, FULL, SLIDING)
    if types is None:
        first = config.integer("max_window_layers", default=28, low=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if SLIDING in types and window is None:
        raise config.fail("layer_types", f"no '{SLIDING}' where use_sliding_window and sliding_window give no window")
    return tuple(window if name == SLIDING else None for name in types)


def _qwen_window(config: JsonReader) -> int | None:
    return _window(config, 4096) if config.boolean("use_sliding_window", default=False) else None


def _window(config: JsonReader, missing: int) -> int | None:
    """`sliding_window`, or what a missing field means; null is none."""
    if config.given("sliding_window"):
        return config.integer("sliding_window")
    return None if "sliding_window" in config else missing


def _agreeing(config: JsonReader, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """`windows` of a family that does not read `layer_types`, refused where the field says otherwise."""
    types = config.layer_types(len(windows), FULL, SLIDING)
    if types is not None and any((name == SLIDING) != (w is not None) for name, w in zip(types, windows, strict=True)):
        raise config.fail("layer_types", "the windows that sliding_window gives: this family does not mix layers")
    return windows


# Llama 2 and 3.x (arXiv 2307.09288 and 2407.21783).
LLAMA = Family(windows=no_windows, max_positions=2048, reads_attention_bias=True, reads_mlp_bias=True)
# Qwen3 (Qwen3 Technical Report, arXiv 2505.09388). Drafters have these layers too.
QWEN3 = Family(windows=qwen_windows, qk_norm=True, num_kv_heads=32, head_dim=128, reads_attention_bias=True)
# What hybrids of Qwen3.5's kind share.
QWEN35 = Family(
    windows=hybrid_windows,
    qk_norm=True,
    num_kv_heads=4,
    head_dim=256,
    reads_attention_bias=True,
    delta_net=partial(read_delta_net, grouped=False),
    attention_gate=True,
    centred_norms=True,
    rotary_share=0.25,
)

# Gemma 4, the text part, without embeddings of each layer's own and without KV that layers share.
GEMMA4 = Family(
    windows=gemma4_windows,
    qk_norm=True,
    experts=gemma4_experts,
    num_kv_heads=4,
    head_dim=256,
    max_positions=131072,
    reads_attention_bias=True,
    gemma4=read_gemma4,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    tied=True,
)
# Gemma 4 12B: missing fields mean something else.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    windows=partial(gemma4_windows, missing=UNIFIED_WINDOW),
    max_positions=262144,
    gemma4=partial(read_gemma4, has_own_embeddings=False),
)

FAMILIES = {
    "Qwen3ForCausalLM": QWEN3,
    # Qwen2 and Qwen2.5 (arXiv 2407.10671 and 2412.15115).
    "Qwen2ForCausalLM": Family(windows=qwen_windows, qkv_bias=True, num_kv_heads=32),
    "LlamaForCausalLM": LLAMA,
    # Mistral (arXiv 2310.06825).
    "MistralForCausalLM": Family(windows=mistral_windows, num_kv_heads=8, max_positions=131072),
    # Qwen3-MoE (arXiv 2505.09388).
    "Qwen3MoeForCausalLM": Family(
        windows=qwen_moe_windows, qk_norm=True, experts=qwen_moe_experts, num_kv_heads=4, reads_attention_bias=True
    ),
    # gpt-oss (arXiv 2508.10925).
    "GptOssForCausalLM": Family(
        windows=gpt_oss_windows,
        sinks=True,
        experts=gpt_oss_experts,
        num_kv_heads=8,
        head_dim=64,
        max_positions=131072,
        rms_norm_eps=1e-5,
        rope=RopeSpec(150000.0, "yarn", 32.0, 4096, attention_factor_of(32.0), truncate=False),
        reads_attention_bias=True,
        attention_bias=True,
    ),
    # Qwen3-Next: gated delta net layers (arXiv 2412.06464) between layers of gated attention.
    "Qwen3NextForCausalLM": replace(
        QWEN35, experts=qwen_next_experts, num_kv_heads=2, delta_net=partial(read_delta_net, grouped=True)
    ),
    # Qwen3.5 and 3.6, the text part.
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5MoeForCausalLM": replace(QWEN35, experts=qwen35_experts, num_kv_heads=2),
    "Gemma4ForCausalLM": GEMMA4,
}
# Multimodal models, of which the text part is served, and its architecture.
TEXT_PARTS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
}
# How `config.json` is read under a name of `TEXT_PARTS` where that is not as of its text part.
VARIANTS = dict.fromkeys(("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"), GEMMA4_UNIFIED)
TARGET_ARCHITECTURES = tuple(FAMILIES)
