"""Drafter checkpoints as z-lab publishes them: a Qwen3 config with a `dflash_config` object (`DFlashDraftModel`)."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.causality import layer_causality
from dflash_backend.checkpoints.decoder_fields import MAX_LAYERS, read_dtype
from dflash_backend.checkpoints.drafter_fields import (
    EMBEDDING,
    LM_HEAD,
    MAX_BLOCK_SIZE,
    QWEN3_LAYER,
    has_mask_embedding,
    read_drafter_decoder,
    read_tensors,
    sliding_layers,
)
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.layer_ids import default_layer_ids
from dflash_backend.checkpoints.spec import DraftSpec

ARCHITECTURE = "DFlashDraftModel"


def read_zlab(directory: Path, config: JsonReader, causal: bool | None = None) -> DraftSpec:
    """Read a z-lab drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`."""
    dflash = config.object("dflash_config", required=True)
    decoder = read_drafter_decoder(config, dflash, QWEN3_LAYER)
    num_target_layers = config.integer("num_target_layers", high=MAX_LAYERS)
    layer_ids = dflash.integers("target_layer_ids")
    if layer_ids is None:
        layer_ids = default_layer_ids(num_target_layers, decoder.num_layers)
    if max(layer_ids) >= num_target_layers or len(layer_ids) > MAX_LAYERS:
        raise dflash.fail("target_layer_ids", f"layer ids below num_target_layers ({num_target_layers})")
    holder = config if config.given("block_size") or not dflash.given("block_size") else dflash
    block_size = holder.integer("block_size", low=2, high=MAX_BLOCK_SIZE)
    vocab_size = config.integer("vocab_size", low=2)
    tensors = read_tensors(directory, config, decoder)
    return DraftSpec(
        path=directory,
        format="z-lab",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=block_size - 1,
        target_layer_ids=layer_ids,
        mask_token_id=dflash.integer("mask_token_id", low=0),
        causal=layer_causality(causal, [config], dflash, sliding_layers(config, decoder.num_layers), True),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", default=vocab_size, low=2),
        target_hidden_size=config.integer("target_hidden_size", default=decoder.hidden_size),
        num_target_layers=num_target_layers,
        target_name=None,
        has_embedding=EMBEDDING in tensors,
        has_lm_head=LM_HEAD in tensors,
        has_mask_embedding=has_mask_embedding(directory),
        dtype=read_dtype(config),
    )
