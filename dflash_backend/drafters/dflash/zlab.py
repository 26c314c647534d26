"""Drafter checkpoints as z-lab publishes them: a Qwen3 config, most often with a `dflash_config` object
(`DFlashDraftModel`)."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import MAX_LAYERS, read_dtype
from dflash_backend.checkpoints.families import QWEN3
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.drafters.dflash.config import (
    KNOWN,
    MAX_BLOCK_SIZE,
    ZLAB_FIELDS,
    DFlashSpec,
    causality_notes,
    has_mask_embedding,
    layer_causality,
    read_drafter_decoder,
    read_logits,
    read_mask_token,
    sliding_layers,
    window_notes,
)
from dflash_backend.drafters.fields import EMBEDDING, LM_HEAD, check_own_head, read_scale, read_tensors, unknown_fields
from dflash_backend.drafters.layer_ids import LAYER, named_layers

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16


def read_zlab(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """Read a z-lab drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`.

    A field that may lie in `dflash_config` or at the top level is taken from `dflash_config` first, as by the authors'
    code. The feature of the target's last layer is taken after the final norm, since their code reads
    `hidden_states[id + 1]` of `transformers`, the last of which has been through it. It calls the target's embedding,
    which for Gemma 4 scales its rows.
    """
    dflash, eagle = config.object("dflash_config"), config.object("eagle_config")
    decoder = read_drafter_decoder(config, dflash, QWEN3)
    # GGUF has no such field: the ids are held to the target that is served, as those of speculators are.
    unsaid = config.given("gguf") and not config.given("num_target_layers")
    num_target_layers = None if unsaid else config.integer("num_target_layers", high=MAX_LAYERS)
    layer_ids, layer_notes = _layer_ids(config, num_target_layers, decoder.num_layers)
    block_size, block_notes = _block_size(config, dflash)
    vocab_size = config.integer("vocab_size", low=2)
    tensors = read_tensors(directory, config, decoder)
    for reader in (config, dflash):
        check_own_head(reader, tensors)
    sliding = sliding_layers(config, decoder.num_layers)
    dtype, dtype_notes = read_dtype(tensors, config)
    configs = (("", config), ("dflash_config.", dflash), ("eagle_config.", eagle))
    return DFlashSpec(
        path=directory,
        format="z-lab",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=block_size - 1,
        target_layer_ids=layer_ids,
        mask_token_id=read_mask_token(dflash, config),
        causal=layer_causality(causal, [config], dflash, sliding, True),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", default=vocab_size, low=2),
        target_hidden_size=config.integer("target_hidden_size", default=decoder.hidden_size),
        num_target_layers=num_target_layers,
        target_name=None,
        has_embedding=EMBEDDING in tensors,
        has_lm_head=LM_HEAD in tensors,
        has_mask_embedding=has_mask_embedding(directory),
        dtype=dtype,
        scales_embedding=True,
        normed_last_layer=num_target_layers is not None and num_target_layers - 1 in layer_ids,
        input_embedding_scale=read_scale("input_embedding_scale", dflash, config),
        logits=read_logits(dflash, config),
        notes=layer_notes
        + block_notes
        + dtype_notes
        + window_notes(config)
        + causality_notes(causal, [config], dflash, sliding)
        + unknown_fields(KNOWN | {"gguf"}, *configs)
        + config.object("gguf").strings("notes"),
    )


def _layer_ids(
    config: JsonReader, num_target_layers: int | None, num_draft_layers: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Layer ids, and notes for the log."""
    named = named_layers(config, ZLAB_FIELDS)
    if named is None:
        assert num_target_layers is not None  # GGUF names the ids
        ids = default_layer_ids(num_target_layers, num_draft_layers)
        note = (
            f"no field names the target's layers, so the layer ids {list(ids)} are the method's default for "
            f"{num_draft_layers} of {num_target_layers} layers; acceptance is low if the drafter was trained on others"
        )
        return ids, (note,)
    if num_target_layers is not None and max(named.ids) >= num_target_layers:
        limit = "below" if named.convention == LAYER else "up to"
        raise named.fail(f"{named.convention} {limit} num_target_layers ({num_target_layers})")
    return named.ids, named.notes


def _block_size(config: JsonReader, dflash: JsonReader) -> tuple[int, tuple[str, ...]]:
    """The block size, and notes for the log."""
    holders = [holder for holder in (dflash, config) if holder.given("block_size")]
    sizes = [holder.integer("block_size", low=2, high=MAX_BLOCK_SIZE) for holder in holders]
    if not sizes:
        return DEFAULT_BLOCK_SIZE, (f"no field gives block_size; {DEFAULT_BLOCK_SIZE} is the authors' default",)
    if len(set(sizes)) == 1:
        return sizes[0], ()
    return sizes[0], (f"dflash_config.block_size is {sizes[0]} and is used; block_size is {sizes[1]}",)


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
