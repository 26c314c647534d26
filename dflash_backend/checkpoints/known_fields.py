"""The fields of a drafter's config that this version reads, refuses or may pass over, so that any other can be named.

A field that nobody reads may change what the drafter computes, and would only show as lower acceptance.
"""

from __future__ import annotations

from dflash_backend.checkpoints.decoder_fields import UNSUPPORTED
from dflash_backend.checkpoints.drafter_fields import OTHER_METHODS
from dflash_backend.checkpoints.json_reader import JsonReader, shown
from dflash_backend.checkpoints.layer_ids import ZLAB_FIELDS

# Read as part of the decoder's shape, or refused where they ask for what is not built.
DECODER = """
hidden_act hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers
max_position_embeddings rms_norm_eps attention_bias mlp_bias rope_theta rope_scaling rope_parameters
partial_rotary_factor layer_types sliding_window use_sliding_window max_window_layers vocab_size dtype torch_dtype
is_neox_style original_max_position_embeddings
"""
# Read wherever a drafter's format has them.
DRAFTER = """
architectures model_type block_size num_target_layers dflash_config eagle_config mask_token_id mask_token
draft_vocab_size target_hidden_size is_causal causal use_swa swa_window_size sample_from_anchor projector_type
use_aux_hidden_state input_embedding_scale output_multiplier final_logit_softcapping logit_scale has_own_lm_head
speculators_model_type speculators_config transformer_layer_config sliding_window_non_causal
"""
# What trains, names or saves a model, and what `transformers` gives to every config.
HARMLESS = """
auto_map transformers_version speculators_version _name_or_path name_or_path bos_token_id eos_token_id pad_token_id
sep_token_id cls_token_id decoder_start_token_id initializer_range use_cache attention_dropout pretraining_tp
output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder is_decoder id2label
label2id problem_type torchscript tokenizer_class tie_word_embeddings _attn_implementation attn_implementation
"""
KNOWN = frozenset(
    [*DECODER.split(), *DRAFTER.split(), *HARMLESS.split(), *UNSUPPORTED, *OTHER_METHODS]
    + [field for _, field, _ in ZLAB_FIELDS]
)


def unknown_fields(*configs: tuple[str, JsonReader]) -> tuple[str, ...]:
    """A sentence for the log that names the fields which nothing here knows; none where all are known. `configs`: what
    goes before a field's name (`dflash_config.`), and the object. Fields that are null or false say nothing."""
    found = [
        f"{prefix}{field} = {shown(value)}"
        for prefix, config in configs
        for field, value in config.data.items()
        if field not in KNOWN and value is not None and value is not False
    ]
    if not found:
        return ()
    return (f"not known here and not read: {', '.join(found)}; drafts are worse if one changes the arithmetic",)
