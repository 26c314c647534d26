"""Drafter checkpoints as z-lab publishes them: a Qwen3 config with a `dflash_config` object (`DFlashDraftModel`)."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import read_decoder, read_dtype
from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import DraftSpec

ARCHITECTURE = "DFlashDraftModel"


def is_zlab(config: JsonReader) -> bool:
    """Whether `config.json` is of this format."""
    return ARCHITECTURE in config.strings("architectures")


def read_zlab(directory: Path, config: JsonReader) -> DraftSpec:
    """Read a z-lab drafter. Raises `CheckpointError`."""
    decoder = read_decoder(config)
    dflash = config.object("dflash_config", required=True)
    num_target_layers = config.integer("num_target_layers", high=1024)
    layer_ids = dflash.integers("target_layer_ids")
    if layer_ids is None:
        layer_ids = default_layer_ids(num_target_layers, decoder.num_layers)
    if max(layer_ids) >= num_target_layers:
        raise dflash.fail("target_layer_ids", f"layer ids below num_target_layers ({num_target_layers})")
    block_size = config.integer("block_size", low=2, high=256)
    vocab_size = config.integer("vocab_size", low=2)
    return DraftSpec(
        path=directory,
        format="z-lab",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=block_size - 1,
        target_layer_ids=layer_ids,
        mask_token_id=dflash.integer("mask_token_id", low=0),
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_hidden_size=decoder.hidden_size,
        num_target_layers=num_target_layers,
        target_name=None,
        has_embedding=False,
        has_lm_head=False,
        has_mask_embedding=False,
        causal=read_causal(config, dflash, decoder.num_layers),
        dtype=read_dtype(config),
    )


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layer ids that the method takes where a checkpoint names none: the middle layer for a one-layer drafter,
    else one for each drafter layer, evenly spaced from 1 to N - 3 (DFlash, arXiv 2602.06036)."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    if last < first:
        raise CheckpointError(
            f"target_layer_ids is missing and has no default for a target of {num_target_layers} layers; name them"
        )
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))


def read_causal(config: JsonReader, dflash: JsonReader, num_layers: int) -> tuple[bool, ...]:
    """Causality per layer: top-level `is_causal`, else `dflash_config.causal`, else by `layer_types` (sliding layers
    are causal), else not causal. Sliding windows themselves are refused: no backend here runs them yet."""
    types = config.strings("layer_types")
    if types and len(types) != num_layers:
        raise config.fail("layer_types", f"one entry for each of the {num_layers} layers")
    if "sliding_attention" in types or dflash.boolean("use_swa", default=False):
        raise CheckpointError(
            f"{config.where}: the drafter has sliding-window layers; expected full attention in every layer"
        )
    if config.data.get("is_causal") is not None:
        return (config.boolean("is_causal", default=False),) * num_layers
    return (dflash.boolean("causal", default=False),) * num_layers
