"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`; arXiv 2407.10671 and 2412.15115): Llama's layer with biases on the query, key
and value projections, always: `config.json` has no field for them."""

from __future__ import annotations

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models.layers import LayerConfig


def layer_config(spec: DecoderSpec, index: int) -> LayerConfig:
    """All layers are alike."""
    return LayerConfig(qkv_bias=True)
