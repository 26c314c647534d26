"""Qwen3 (`Qwen3ForCausalLM`; Qwen3 Technical Report, arXiv 2505.09388): every query and key head is normalised before
the rotation, and attention has no biases unless `attention_bias` says so. The DFlash drafter has these layers too."""

from __future__ import annotations

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.layers import LayerConfig


def layer_config(spec: DecoderSpec, index: int) -> LayerConfig:
    """All layers are alike."""
    return LayerConfig(qk_norm=True, qkv_bias=spec.attention_bias, output_bias=spec.attention_bias)
