"""Llama 2 and 3.x (`LlamaForCausalLM`; arXiv 2307.09288 and 2407.21783): pre-norm layers without q/k norm, and without
biases unless `attention_bias` or `mlp_bias` says so."""

from __future__ import annotations

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.layers import LayerConfig


def layer_config(spec: DecoderSpec, index: int) -> LayerConfig:
    """All layers are alike."""
    return LayerConfig(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias, mlp_bias=spec.mlp_bias)
