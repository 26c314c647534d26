"""The mixtures of experts as `config.json` describes them: Qwen3-MoE's, Qwen3-Next's and gpt-oss's.

A field that is missing takes the value that `transformers` 5 gives it.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import ClampedSwiglu, MoeSpec

MAX_EXPERTS = 1024
MXFP4 = "mxfp4"
# Weights that share a scale in MXFP4.
MXFP4_GROUP = 32


def qwen_next_experts(config: JsonReader, num_layers: int) -> MoeSpec | None:
    """The experts of Qwen3-Next, in the layers that Qwen3-MoE's fields name, with one that runs over every token; None
    with `num_experts` 0."""
    if config.data.get("num_experts") == 0:
        return None
    moe = qwen_moe_experts(config, num_layers, num_experts=512, per_token=10, inner=512, norm_topk_prob=True)
    return replace(moe, shared_size=config.integer("shared_expert_intermediate_size", default=512))


def qwen35_experts(config: JsonReader, num_layers: int) -> MoeSpec:
    """The experts of Qwen3.5, in every layer, with one that runs over every token; their weights sum to 1."""
    num_experts = config.integer("num_experts", default=256, high=MAX_EXPERTS)
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=_experts_per_token(config, 8, num_experts),
        intermediate_size=config.integer("moe_intermediate_size", default=512),
        norm_topk_prob=True,
        sparse_layers=(True,) * num_layers,
        shared_size=config.integer("shared_expert_intermediate_size", default=512),
    )


def qwen_moe_experts(
    config: JsonReader,
    num_layers: int,
    num_experts: int = 128,
    per_token: int = 8,
    inner: int = 768,
    norm_topk_prob: bool = False,
) -> MoeSpec:
    """The experts of Qwen3-MoE: in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`. The numbers are
    what missing fields mean."""
    # Published configs have the first name, what `transformers` 5 saves has the second.
    field = "num_experts" if config.given("num_experts") else "num_local_experts"
    num_experts = config.integer(field, default=num_experts, high=MAX_EXPERTS)
    step = config.integer("decoder_sparse_step", default=1)
    dense = _mlp_only_layers(config, num_layers)
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=_experts_per_token(config, per_token, num_experts),
        intermediate_size=config.integer("moe_intermediate_size", default=inner),
        norm_topk_prob=config.boolean("norm_topk_prob", default=norm_topk_prob),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def _experts_per_token(config: JsonReader, default: int, num_experts: int) -> int:
    per_token = config.integer("num_experts_per_tok", default=default, high=num_experts)
    if per_token > num_experts:
        raise config.fail("num_experts_per_tok", f"at most the number of experts ({num_experts}), and {default} is not")
    return per_token


def _mlp_only_layers(config: JsonReader, num_layers: int) -> frozenset[int]:
    if config.data.get("mlp_only_layers") == []:
        return frozenset()
    layers = frozenset(config.integers("mlp_only_layers") or ())
    if any(layer >= num_layers for layer in layers):
        raise config.fail("mlp_only_layers", f"layers below num_hidden_layers ({num_layers})")
    return layers


def gemma4_experts(config: JsonReader, num_layers: int) -> MoeSpec | None:
    """The experts of Gemma 4, beside the MLP in every layer; None without `enable_moe_block`."""
    if not config.boolean("enable_moe_block", default=False):
        return None
    num_experts = config.integer("num_experts", high=MAX_EXPERTS)
    per_token = config.integer("top_k_experts", high=num_experts)
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=config.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=(True,) * num_layers,
        stacked=True,
        gelu=True,
    )


def gpt_oss_experts(config: JsonReader, num_layers: int) -> MoeSpec:
    """The experts of gpt-oss, in every layer. Their router's softmax is over the chosen experts alone: the same as one
    over all whose chosen weights are scaled to sum to 1."""
    field = "num_experts" if config.given("num_experts") else "num_local_experts"
    num_experts = config.integer(field, default=128, high=MAX_EXPERTS)
    swiglu = ClampedSwiglu(config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0))
    mxfp4 = config.object("quantization_config").string("quant_method", default="") == MXFP4
    inner = config.integer("intermediate_size")
    if mxfp4:
        for size in ("hidden_size", "intermediate_size"):
            if config.integer(size) % MXFP4_GROUP:
                raise config.fail(size, f"a multiple of {MXFP4_GROUP}, the weights that share a scale in MXFP4")
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=_experts_per_token(config, 4, num_experts),
        intermediate_size=inner,
        norm_topk_prob=True,
        sparse_layers=(True,) * num_layers,
        swiglu=swiglu,
        mxfp4=mxfp4,
    )
