"""Mistral (`MistralForCausalLM`; arXiv 2310.06825): Llama's layer without any bias; the first releases let every layer
see a sliding window only, which is in the spec's `sliding_windows`."""

from __future__ import annotations

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.layers import LayerConfig


def layer_config(spec: DecoderSpec, index: int) -> LayerConfig:
    """All layers are alike."""
    return LayerConfig()
