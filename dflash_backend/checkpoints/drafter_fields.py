"""What both drafter formats share: windows of the layers, scales, fields of methods that are not DFlash, tensors that a
checkpoint may ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import check_stack, read_decoder, refuse_unsupported
from dflash_backend.checkpoints.families import LLAMA, QWEN3, SLIDING, Family, qwen_windows, read_layer_types
from dflash_backend.checkpoints.files import MASK_EMBEDDING, TensorHeader, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
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
