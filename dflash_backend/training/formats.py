"""How a trained drafter is written: the `config.json` of its kind in its authors' format or in that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_backend.training.dflash2 import TAPS, DFlash2DraftModel
from dflash_backend.training.dspark import DSparkDraftModel
from dflash_backend.training.eagle3 import Eagle3DraftModel
from dflash_backend.training.network import DFLASH, DFLASH2, DSPARK, EAGLE3, DrafterConfig, DraftModel, Shape

Fields = dict[str, Any]
ZLAB, SPECULATORS = "zlab", "speculators"
FORMATS = (ZLAB, SPECULATORS)
MODULES: Mapping[str, type[DraftModel]] = {
    DFLASH: DraftModel,
    DFLASH2: DFlash2DraftModel,
    DSPARK: DSparkDraftModel,
    EAGLE3: Eagle3DraftModel,
}
KINDS = tuple(MODULES)
# By which name each kind's own code has its class: z-lab's, and DeepSpec's.
ARCHITECTURES = {
    DFLASH: "DFlashDraftModel",
    DFLASH2: "DFlash2DraftModel",
    DSPARK: "Qwen3DSparkModel",
    EAGLE3: "Qwen3Eagle3Model",
}
LIBRARY = {
    DFLASH: "DFlashSpeculator",
    DFLASH2: "DFlash2Speculator",
    DSPARK: "DSparkSpeculator",
    EAGLE3: "Eagle3DraftModel",
}


@dataclass(frozen=True)
class Naming:
    """What a drafter's config says of its target beside sizes. target_name: a path or a hub id. architectures: the
    target's. special: `bos_token_id`, `eos_token_id` and `pad_token_id`, those that there are."""

    target_name: str | None = None
    architectures: tuple[str, ...] = ("Qwen3ForCausalLM",)
    special: Mapping[str, int] = field(default_factory=dict)


def make_drafter(config: DrafterConfig) -> DraftModel:
    """A drafter of the kind that the config names, before training."""
    return MODULES[config.drafter](config)


def decoder_fields(shape: Shape, layers: int, special: Mapping[str, int]) -> Fields:
    """The fields of a Qwen3 `config.json` of this shape."""
    return {
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **special,
    }


def config_fields(config: DrafterConfig, form: str, naming: Naming) -> Fields:
    """The `config.json` of a drafter in a format, one of `FORMATS`."""
    layers = 1 if config.drafter == EAGLE3 else config.draft_layers
    decoder = decoder_fields(config.shape, layers, naming.special)
    if form == SPECULATORS:
        return _speculators(config, decoder, naming)
    fields: Fields = {"architectures": [ARCHITECTURES[config.drafter]], **decoder}
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    layer_ids = list(config.target_layer_ids)
    if config.drafter in (DFLASH, DFLASH2):  # as z-lab saves them
        own = {"target_layer_ids": layer_ids, "mask_token_id": config.mask_token_id, "causal": False}
        own |= _conv(config) if config.drafter == DFLASH2 else {}
        fields |= {"block_size": config.block_size, "num_target_layers": config.target_layers, "dflash_config": own}
        return fields
    # As deepseek-ai's DeepSpec saves EAGLE-3, and DSpark, each place of whose block gives a draft.
    taps = {"num_target_layers": config.target_layers, "target_layer_ids": layer_ids}
    if config.drafter == EAGLE3:
        return fields | taps | {"ttt_length": config.eagle_drafts, "target_model_name_or_path": naming.target_name}
    of_block = {"block_size": config.num_drafts, **taps, "mask_token_id": config.mask_token_id}
    return fields | of_block | _markov(config)


def _conv(config: DrafterConfig) -> Fields:
    return {
        "conv_kernel_size": TAPS,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }


def _markov(config: DrafterConfig) -> Fields:
    return {
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _speculators(config: DrafterConfig, decoder: Fields, naming: Naming) -> Fields:
    """As the speculators library saves it. It counts a target's layers from the embedding's output on."""
    boundary_ids = [i + 1 for i in config.target_layer_ids]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts, "verifier_accept_k": 1}
    fields: Fields = {
        "architectures": [LIBRARY[config.drafter]],
        "speculators_model_type": config.drafter,
        "speculators_config": {
            "algorithm": config.drafter,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": naming.target_name, "architectures": list(naming.architectures)},
        },
        "draft_vocab_size": config.num_draft_tokens,
        "target_hidden_size": config.shape.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": decoder,
    }
    if config.drafter == EAGLE3:
        return {
            **fields,
            "norm_before_residual": False,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": boundary_ids,
        }
    own = _markov(config) if config.drafter == DSPARK else {"sample_from_anchor": False}
    own |= _conv(config) if config.drafter == DFLASH2 else {}
    return {
        **fields,
        "block_size": config.num_drafts if config.drafter == DSPARK else config.block_size,
        "aux_hidden_state_layer_ids": boundary_ids,
        "mask_token_id": config.mask_token_id,
        # No layer has a window; vLLM takes this field for all layers.
        "sliding_window_non_causal": True,
        **own,
    }
