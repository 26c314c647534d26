"""DFlash drafters of the speculators library: `speculators_model_type: "dflash"`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import read_dtype, refuse_unsupported
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.drafters.dflash.config import (
    KNOWN,
    LAYERS,
    MAX_BLOCK_SIZE,
    DFlashSpec,
    causality_notes,
    has_mask_embedding,
    layer_causality,
    read_drafter_decoder,
    read_logits,
    read_mask_token,
    refuse_other_methods,
    sliding_layers,
    window_notes,
)
from dflash_backend.drafters.fields import (
    EMBEDDING,
    LM_HEAD,
    check_own_head,
    missing_fields,
    read_scale,
    read_tensors,
    unknown_fields,
)
from dflash_backend.drafters.layer_ids import SPECULATORS_FIELDS, NamedLayers, named_layers
from dflash_backend.drafters.speculators import layer_config, verifier_name

NON_CAUSAL = "sliding_window_non_causal"


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """Read a speculators drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`."""
    spec = read_shared(directory, config, causal)
    return dataclasses.replace(spec, notes=spec.notes + missing_fields({"sample_from_anchor": False}, config))


def read_shared(directory: Path, config: JsonReader, causal: bool | None = None) -> DFlashSpec:
    """As `read_speculators`, without a word on who drafts from the anchor, which other methods read by themselves.

    The feature of the target's last layer is taken before the final norm: the library trains on what vLLM captures.
    """
    refuse_unsupported(config)
    refuse_other_methods(config)
    layer = layer_config(config)
    dflash = config.object("dflash_config")
    kind = layer.string("model_type", default="qwen3")
    if kind not in LAYERS:
        raise layer.fail("model_type", "one of " + ", ".join(LAYERS))
    decoder = read_drafter_decoder(layer, dflash, LAYERS[kind])
    block_size = config.integer("block_size", low=2, high=MAX_BLOCK_SIZE)
    vocab_size = layer.integer("vocab_size", low=2)
    layers = _layers(config)
    tensors = read_tensors(directory, layer, decoder)
    check_own_head(config, tensors)
    k, k_notes = speculative_tokens(config, block_size, block_size - 1)
    sliding = sliding_layers(layer, decoder.num_layers)
    dtype, dtype_notes = read_dtype(tensors, config, layer)
    configs = (("", config), ("transformer_layer_config.", layer), ("dflash_config.", dflash))
    return DFlashSpec(
        path=directory,
        format="speculators",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=k,
        target_layer_ids=layers.ids,
        mask_token_id=read_mask_token(config, dflash),
        causal=layer_causality(
            causal,
            [config, layer],
            dflash,
            sliding,
            sliding_causal=not config.boolean(NON_CAUSAL, default=False),
        ),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", default=vocab_size, low=2),
        target_hidden_size=config.integer("target_hidden_size", default=decoder.hidden_size),
        num_target_layers=None,
        target_name=verifier_name(config),
        has_embedding=EMBEDDING in tensors,
        has_lm_head=LM_HEAD in tensors,
        has_mask_embedding=has_mask_embedding(directory),
        dtype=dtype,
        input_embedding_scale=read_scale("input_embedding_scale", dflash, config, layer),
        logits=read_logits(dflash, config, layer),
        notes=layers.notes
        + k_notes
        + dtype_notes
        + window_notes(layer)
        + causality_notes(causal, [config, layer], dflash, sliding, NON_CAUSAL)
        + unknown_fields(KNOWN, *configs),
    )


def _layers(config: JsonReader) -> NamedLayers:
    layers = named_layers(config, SPECULATORS_FIELDS)
    if layers is None:
        expected = "the boundary ids of the target's layers that the drafter reads, each at least 1"
        raise config.fail(SPECULATORS_FIELDS[0][1], expected)
    return layers


def speculative_tokens(config: JsonReader, block_size: int, possible: int) -> tuple[int, tuple[str, ...]]:
    """k of the first proposal method, else as many as are possible, in a block of this size; and notes for the log.

    Until April 2026 the library wrote the block size itself, though the anchor of DFlash takes one place
    (vllm-project/speculators pull request 456).
    """
    methods = config.object("speculators_config").objects("proposal_methods")
    if not methods:
        return possible, ()
    k = methods[0].integer("speculative_tokens", default=possible)
    if k <= possible:
        return k, ()
    why = f"a block of {block_size} has no more places"
    if possible < block_size:
        why = f"the anchor takes one place of a block of {block_size}"
    note = f"speculative_tokens is {k}; k is {possible}, as {why}"
    return possible, (note,)
