"""What both drafter formats share: windows of the layers, tensors that a checkpoint may ship."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import (
    SLIDING,
    Family,
    check_stack,
    no_windows,
    qwen_windows,
    read_decoder,
    read_layer_types,
    refuse_unsupported,
)
from dflash_backend.checkpoints.files import MASK_EMBEDDING, weight_files
from dflash_backend.checkpoints.headers import TensorHeader, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import DecoderSpec

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MAX_BLOCK_SIZE = 256

# The layer is Qwen3's either way; the two config classes differ in what they give to missing fields.
QWEN3_LAYER = Family(windows=qwen_windows, num_kv_heads=32, head_dim=128, reads_attention_bias=True)
LLAMA_LAYER = Family(windows=no_windows, max_positions=2048, reads_attention_bias=True)
LAYERS = {"qwen3": QWEN3_LAYER, "llama": LLAMA_LAYER}

# Fields of related methods whose arithmetic is not DFlash's.
OTHER_METHODS = {
    "markov_rank": "the Markov head of DSpark",
    "markov_head_type": "the Markov head of DSpark",
    "enable_confidence_head": "the confidence head of DSpark",
    "use_confidence_head": "the confidence head of DSpark",
    "conv_kernel_size": "the convolutions of DFlash2",
    "shift_label": "drafts shifted by one position",
}


def read_drafter_decoder(config: JsonReader, dflash: JsonReader, family: Family) -> DecoderSpec:
    """The shape of a drafter's stack, with the windows that drafters have. Raises `CheckpointError`."""
    refuse_other_methods(config, dflash)
    refuse_unsupported(dflash)
    return read_decoder(config, dataclasses.replace(family, windows=partial(read_windows, dflash=dflash)), drafter=True)


def read_windows(config: JsonReader, num_layers: int, dflash: JsonReader) -> tuple[int | None, ...]:
    """Sliding window of each layer.

    The layers that `layer_types` calls sliding take `dflash_config.swa_window_size`, else `sliding_window`.
    `dflash_config.use_swa` makes all layers sliding where `layer_types` names none.
    """
    types = read_layer_types(config, num_layers)
    sliding = tuple(name == SLIDING for name in types or ())
    if not any(sliding):
        if not dflash.boolean("use_swa", default=False):
            return qwen_windows(config, num_layers) if types is None else (None,) * num_layers
        sliding = (True,) * num_layers
    elif "use_sliding_window" in config and not config.boolean("use_sliding_window", default=True):
        raise config.fail("use_sliding_window", f"true where layer_types has '{SLIDING}'")
    for reader, field in ((dflash, "swa_window_size"), (config, "sliding_window")):
        if reader.given(field):
            window = reader.integer(field)
            return tuple(window if is_sliding else None for is_sliding in sliding)
    raise config.fail("sliding_window", "a number of positions, as the drafter has sliding-window layers")


def sliding_layers(config: JsonReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers `layer_types` calls sliding, as the rules of causality ask."""
    return tuple(name == SLIDING for name in read_layer_types(config, num_layers) or (None,) * num_layers)


def refuse_other_methods(*configs: JsonReader) -> None:
    """Raise `CheckpointError` for fields of related methods, whose drafts would be wrong here."""
    for config in configs:
        for field, meaning in OTHER_METHODS.items():
            if config.data.get(field):
                raise config.fail(field, f"no such field: {meaning} is not part of DFlash")


def read_tensors(directory: Path, config: JsonReader, decoder: DecoderSpec) -> Mapping[str, TensorHeader]:
    """The headers of a drafter's tensors, checked against the stack that its config describes."""
    tensors = read_headers(weight_files(directory))
    check_stack(config, decoder, "layers.", tensors)
    return tensors


def has_mask_embedding(directory: Path) -> bool:
    """Whether a mask embedding that was trained on its own lies beside the weights."""
    return (directory / MASK_EMBEDDING).is_file()
