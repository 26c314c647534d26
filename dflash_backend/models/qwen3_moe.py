"""Qwen3-MoE (`Qwen3MoeForCausalLM`; Qwen3 Technical Report, arXiv 2505.09388): Qwen3 with a mixture of experts in place
of the MLP, in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to it."""

from __future__ import annotations

import dataclasses

from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.models import qwen3
from dflash_backend.models.layers import LayerConfig


def layer_config(spec: DecoderSpec, index: int) -> LayerConfig:
    """Qwen3's form, with experts in the sparse layers."""
    form = qwen3.layer_config(spec, index)
    sparse = spec.moe is not None and spec.moe.sparse_layers[index]
    return dataclasses.replace(form, moe=spec.moe) if sparse else form
