"""What both drafter formats share: windows and causality of the layers, scales, the fields of a config that are read,
refused or passed over, tensors that a checkpoint may ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import UNSUPPORTED, check_stack, read_decoder, refuse_unsupported
from dflash_backend.checkpoints.families import LLAMA, QWEN3, SLIDING, Family, qwen_windows, read_layer_types
from dflash_backend.checkpoints.files import MASK_EMBEDDING, TensorHeader, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader, shown
from dflash_backend.checkpoints.layer_ids import ZLAB_FIELDS
from dflash_backend.checkpoints.spec import DecoderSpec, LogitsSpec

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MAX_BLOCK_SIZE = 256
DFLASH = "dflash"

# The layer is Qwen3's either way; the two config classes differ in what they give to missing fields.
LAYERS = {"qwen3": QWEN3, "llama": dataclasses.replace(LLAMA, qk_norm=True, reads_mlp_bias=False)}

# Fields of related methods whose arithmetic is not DFlash's.
OTHER_METHODS = {
    "markov_rank": "the Markov head of DSpark",
    "markov_head_type": "the Markov head of DSpark",
    "enable_confidence_head": "the confidence head of DSpark",
    "use_confidence_head": "the confidence head of DSpark",
    "conv_kernel_size": "the convolutions of DFlash2",
    "selector_rank": "the candidate selector of DFlash2",
    "dspark_target_layer_ids": "the target layers of DSpark",
    "shift_label": "drafts shifted by one position",
    "fc_norm": "a norm at the fc projection, as EAGLE-3 has it,",
    "norm_before_fc": "a norm before the fc projection, as EAGLE-3 has it,",
    "norm_output": "a norm of the output, as EAGLE-3 has it,",
}


# The log names the fields that are in none of the following: what they change would only show as lower acceptance.
# Read as part of the decoder's shape, or refused.
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


def read_drafter_decoder(config: JsonReader, dflash: JsonReader, family: Family) -> DecoderSpec:
    """The shape of a drafter's stack, with the windows that drafters have. Raises `CheckpointError`."""
    refuse_other_methods(config, dflash)
    refuse_unsupported(dflash)
    return read_decoder(config, dataclasses.replace(family, windows=partial(read_windows, dflash=dflash)), drafter=True)


def read_windows(config: JsonReader, num_layers: int, dflash: JsonReader) -> tuple[int | None, ...]:
    """Sliding window of each layer.

    The sliding layers take `dflash_config.swa_window_size`, else `sliding_window`. `dflash_config.use_swa` makes all
    layers sliding where none is by itself.
    """
    sliding = sliding_layers(config, num_layers)
    given = config.given("layer_types")
    if not any(sliding):
        if not dflash.boolean("use_swa", default=False):
            return (None,) * num_layers
        sliding = (True,) * num_layers
    elif given and "use_sliding_window" in config and not config.boolean("use_sliding_window", default=True):
        raise config.fail("use_sliding_window", f"true where layer_types has '{SLIDING}'")
    for reader, field in ((dflash, "swa_window_size"), (config, "sliding_window")):
        if reader.given(field):
            window = reader.integer(field)
            return tuple(window if is_sliding else None for is_sliding in sliding)
    if not given and config.boolean("use_sliding_window", default=False):
        return qwen_windows(config, num_layers)  # the config class has a window of its own
    raise config.fail("sliding_window", "a number of positions, as the drafter has sliding-window layers")


def sliding_layers(config: JsonReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers slide by themselves: those that `layer_types` calls sliding; without it those that Qwen3's config
    class would, from `max_window_layers` on where `use_sliding_window` is true."""
    types = read_layer_types(config, num_layers)
    if types is None:
        return tuple(window is not None for window in qwen_windows(config, num_layers))
    return tuple(name == SLIDING for name in types)


def window_notes(config: JsonReader) -> tuple[str, ...]:
    """A sentence for the log where the sources disagree about the windows."""
    slides = SLIDING in config.strings("layer_types") and config.given("sliding_window")
    if not slides or config.given("use_sliding_window"):
        return ()
    return (
        f"layer_types has '{SLIDING}' and use_sliding_window is missing: the sliding_window of "
        f"{config.integer('sliding_window')} is used, which Qwen3's config class in transformers would drop",
    )


def read_logits(*configs: JsonReader) -> LogitsSpec:
    """What becomes of the logits, each field from the first of `configs` that has it. Raises `CheckpointError`."""
    softcap = None
    for config in configs:
        if config.given("final_logit_softcapping"):
            # The authors' code reads 0 as none.
            if config.data["final_logit_softcapping"] != 0:
                softcap = config.number("final_logit_softcapping")
            break
    return LogitsSpec(read_scale("output_multiplier", *configs), softcap, read_scale("logit_scale", *configs))


def read_scale(field: str, *configs: JsonReader) -> float:
    """A factor above 0, from the first of `configs` that has it, else 1. Raises `CheckpointError`."""
    reader = next((config for config in configs if config.given(field)), None)
    return 1.0 if reader is None else reader.number(field)


def refuse_other_methods(*configs: JsonReader) -> None:
    """Raise `CheckpointError` for fields of related methods, whose drafts would be wrong here."""
    for config in configs:
        for field, meaning in OTHER_METHODS.items():
            if config.data.get(field):
                raise config.fail(field, f"no such field: {meaning} is not part of DFlash")
        if config.boolean("sample_from_anchor", default=False):
            raise config.fail("sample_from_anchor", "false: a DFlash drafter does not sample from the anchor's output")
        if config.string("projector_type", default=DFLASH) != DFLASH:
            raise config.fail("projector_type", f"'{DFLASH}'; other projectors are not supported")
        if not config.boolean("use_aux_hidden_state", default=True):
            raise config.fail(
                "use_aux_hidden_state",
                "true: a drafter that reads the target's last hidden state alone is not supported",
            )


def read_mask_token(*configs: JsonReader) -> int:
    """The mask token's id, from the first of `configs` that has it. Raises `CheckpointError`."""
    for config in configs:
        if config.given("mask_token_id"):
            return config.integer("mask_token_id", low=0)
    for config in configs:
        if config.given("mask_token"):
            raise config.fail("mask_token", "an id in mask_token_id: the token's id in the target's tokenizer")
    raise configs[0].fail("mask_token_id", "an integer from 0 to 2147483648")


def read_tensors(directory: Path, config: JsonReader, decoder: DecoderSpec) -> Mapping[str, TensorHeader]:
    """The headers of a drafter's tensors, checked against the stack that its config describes."""
    tensors = read_headers(directory)
    check_stack(config, decoder, "layers.", tensors)
    return tensors


def check_own_head(config: JsonReader, has_lm_head: bool) -> None:
    """Raise `CheckpointError` where `has_own_lm_head` says otherwise than the weights."""
    if config.given("has_own_lm_head") and config.boolean("has_own_lm_head", default=False) != has_lm_head:
        found = f"a tensor '{LM_HEAD}'" if has_lm_head else f"no tensor '{LM_HEAD}'"
        raise config.fail("has_own_lm_head", f"{str(has_lm_head).lower()}, as the weights beside it have {found}")


def has_mask_embedding(directory: Path) -> bool:
    """Whether a mask embedding that was trained on its own lies beside the weights."""
    return (directory / MASK_EMBEDDING).is_file()


def layer_causality(
    setting: bool | None,
    configs: Sequence[JsonReader],
    dflash: JsonReader,
    sliding: Sequence[bool],
    sliding_causal: bool,
) -> tuple[bool, ...]:
    """Causality of each drafter layer. The first that is present decides:

    1. `setting`, the server's `causal`, None for auto;
    2. `is_causal` of the first of `configs` that has it;
    3. `dflash_config.causal`, from `dflash`;
    4. layers that `layer_types` calls sliding (`sliding`, one entry for each layer) are causal if `sliding_causal`;
    5. else not causal.
    """
    if setting is not None:
        return (setting,) * len(sliding)
    for config in configs:
        if config.given("is_causal"):
            return (config.boolean("is_causal", default=False),) * len(sliding)
    if dflash.given("causal"):
        return (dflash.boolean("causal", default=False),) * len(sliding)
    return tuple(is_sliding and sliding_causal for is_sliding in sliding)


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
