"""Drafter checkpoints of the speculators library: `speculators_model_type: "dflash"`, the decoder's own config in
`transformer_layer_config`, layers named by boundary ids, and often the target's name, so that such a directory given
alone is enough."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.causality import layer_causality
from dflash_backend.checkpoints.decoder_fields import MAX_LAYERS, read_dtype, refuse_unsupported
from dflash_backend.checkpoints.drafter_fields import (
    EMBEDDING,
    LAYERS,
    LM_HEAD,
    MAX_BLOCK_SIZE,
    has_mask_embedding,
    read_drafter_decoder,
    read_tensors,
    refuse_other_methods,
    sliding_layers,
)
from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.layer_ids import to_layer_ids
from dflash_backend.checkpoints.spec import DraftSpec

MODEL_TYPE = "speculators_model_type"
DFLASH = "dflash"
BOUNDARY_FIELDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def is_speculators(config: JsonReader) -> bool:
    """Whether `config.json` was written by the speculators library, for a method of any kind."""
    return config.given(MODEL_TYPE)


def read_speculators(directory: Path, config: JsonReader, causal: bool | None = None) -> DraftSpec:
    """Read a speculators drafter. `causal` is the server's setting, None for auto. Raises `CheckpointError`."""
    _check_method(config)
    layer = config.object("transformer_layer_config", required=True)
    dflash = config.object("dflash_config")
    kind = layer.string("model_type", default="qwen3")
    if kind not in LAYERS:
        raise layer.fail("model_type", "one of " + ", ".join(LAYERS))
    decoder = read_drafter_decoder(layer, dflash, LAYERS[kind])
    block_size = config.integer("block_size", low=2, high=MAX_BLOCK_SIZE)
    vocab_size = layer.integer("vocab_size", low=2)
    tensors = read_tensors(directory, layer, decoder)
    return DraftSpec(
        path=directory,
        format="speculators",
        decoder=decoder,
        block_size=block_size,
        num_speculative_tokens=_speculative_tokens(config, block_size),
        target_layer_ids=_layer_ids(config),
        mask_token_id=config.integer("mask_token_id", low=0),
        causal=layer_causality(
            causal,
            [config, layer],
            dflash,
            sliding_layers(layer, decoder.num_layers),
            sliding_causal=not config.boolean("sliding_window_non_causal", default=False),
        ),
        vocab_size=vocab_size,
        draft_vocab_size=config.integer("draft_vocab_size", default=vocab_size, low=2),
        target_hidden_size=config.integer("target_hidden_size", default=decoder.hidden_size),
        num_target_layers=None,
        target_name=verifier_name(config),
        has_embedding=EMBEDDING in tensors,
        has_lm_head=LM_HEAD in tensors,
        has_mask_embedding=has_mask_embedding(directory),
        dtype=read_dtype(config, layer),
    )


def verifier_name(config: JsonReader) -> str | None:
    """The target that a drafter was made for, a path or a hub id; None where the checkpoint does not say."""
    verifier = config.object("speculators_config").object("verifier")
    return verifier.string("name_or_path", default="") or None


def _check_method(config: JsonReader) -> None:
    """Refuse other methods of the library by name, and forms of DFlash that are computed otherwise."""
    if config.string(MODEL_TYPE) != DFLASH:
        raise config.fail(MODEL_TYPE, f"'{DFLASH}': drafters of other methods are not supported")
    if config.boolean("sample_from_anchor", default=False):
        raise config.fail("sample_from_anchor", "false: a DFlash drafter does not sample from the anchor's output")
    if config.string("projector_type", default=DFLASH) != DFLASH:
        raise config.fail("projector_type", f"'{DFLASH}'; other projectors are not supported")
    refuse_unsupported(config)
    refuse_other_methods(config)


def _layer_ids(config: JsonReader) -> tuple[int, ...]:
    field = next((name for name in BOUNDARY_FIELDS if config.given(name)), BOUNDARY_FIELDS[0])
    boundaries = config.integers(field, low=1)
    if boundaries is None or len(boundaries) > MAX_LAYERS:
        raise config.fail(field, "the boundary ids of the target's layers that the drafter reads, each at least 1")
    return to_layer_ids(boundaries)


def _speculative_tokens(config: JsonReader, block_size: int) -> int:
    """k of the first proposal method; where there is none, all places of the block but the anchor's."""
    methods = config.object("speculators_config").objects("proposal_methods")
    if not methods:
        return block_size - 1
    k = methods[0].integer("speculative_tokens", default=block_size - 1)
    if k > block_size - 1:
        raise CheckpointError(
            f"{methods[0].where}: field 'speculative_tokens' is {k}; a block of {block_size} has room for "
            f"{block_size - 1}, as the anchor takes one place"
        )
    return k
