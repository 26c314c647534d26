"""Target checkpoints: Hugging Face directories of the architectures in `families.FAMILIES`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.decoder_fields import (
    DUAL_CHUNKS,
    check_stack,
    one_chunk,
    read_decoder,
    read_dtype,
    read_eos,
)
from dflash_backend.checkpoints.families import FAMILIES, TARGET_ARCHITECTURES, TEXT_PARTS, VARIANTS, Family
from dflash_backend.checkpoints.files import TensorHeader, check_files, have_equal_numbers, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import read_quantization
from dflash_backend.checkpoints.quantization.stored import holds_weight
from dflash_backend.checkpoints.rope import unread_rope_fields, with_scaling
from dflash_backend.checkpoints.spec import CheckpointError, MoeSpec, TargetSpec
from dflash_backend.checkpoints.tensor_names import EMBEDDING, HEAD, is_tied, target_prefix
from dflash_backend.error_text import shown

NO_FIELDS: Mapping[str, Any] = {}
# How the tensors of images and sound begin in multimodal checkpoints.
OTHER_PARTS = (
    "model.visual.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.embed_audio.",
)


def read_target(directory: Path, rope_scaling: Mapping[str, Any] = NO_FIELDS) -> TargetSpec:
    """Read a target's `config.json`. rope_scaling: the fields of the setting of that name, which take the place of its
    own rotary scaling. Raises `CheckpointError`."""
    check_files(directory)
    config = JsonReader.load(directory / "config.json")
    given = _architecture(config)
    architecture = TEXT_PARTS.get(given, given)
    family = VARIANTS.get(given, FAMILIES[architecture])
    read_quantization(config)  # refused before anything else is read
    # A multimodal model has the text part's fields and tensors one level down.
    nested = config.given("text_config")
    text = config.object("text_config") if nested else config
    prefix = target_prefix(config)
    scaled = _with_scaling(text, family, rope_scaling) if rope_scaling else text
    decoder = read_decoder(scaled, family)
    headers = read_headers(directory)
    check_stack(text, decoder, f"{prefix}layers.", headers)
    if decoder.moe is not None:
        decoder = replace(decoder, moe=replace(decoder.moe, stacked=_has_stacked_experts(decoder.moe, headers)))
    dtype, dtype_notes = read_dtype(headers, text, config)
    tied, head_notes = _is_tied(config, family, prefix, headers)
    return TargetSpec(
        path=directory,
        architecture=architecture,
        decoder=decoder,
        vocab_size=text.integer("vocab_size", low=2),
        tie_word_embeddings=tied,
        dtype=dtype,
        eos_token_ids=read_eos(directory),
        prefix=prefix,
        left_out=OTHER_PARTS if nested else (),
        notes=head_notes
        + dtype_notes
        + unread_rope_fields(scaled)
        + _chunk_notes(text)
        + config.object("gguf").strings("notes"),
    )


def _with_scaling(config: JsonReader, family: Family, rope_scaling: Mapping[str, Any]) -> JsonReader:
    if family.gemma4 is not None:
        raise CheckpointError(
            f"{config.where}: setting 'rope_scaling' is for one rotary embedding of all layers, and Gemma 4 has one "
            "for each kind of layer: leave it out"
        )
    return with_scaling(config, rope_scaling)


def _chunk_notes(config: JsonReader) -> tuple[str, ...]:
    """A sentence for the log where a target could go further with attention in chunks."""
    if (positions := one_chunk(config)) is None:
        return ()
    return (
        f"{DUAL_CHUNKS} asks for attention in chunks beyond {positions} positions, which is not built: requests have "
        "at most that many",
    )


def _is_tied(
    config: JsonReader, family: Family, prefix: str, headers: Mapping[str, TensorHeader]
) -> tuple[bool, tuple[str, ...]]:
    """Whether the head is the embedding, and notes for the log. As in `transformers` 5, a head that lies beside the
    embedding and has other numbers counts, whatever the config says."""
    if not is_tied(config, family.tied):
        return False, ()
    if not holds_weight(headers, HEAD.removesuffix(".weight")):
        return True, ()
    head, embedding = headers.get(HEAD), headers.get(prefix + EMBEDDING)
    if head is not None and embedding is not None and have_equal_numbers(head, embedding):
        return True, ()
    return False, (
        f"tie_word_embeddings is true, and {'a quantised head' if head is None else HEAD} lies in the files whose "
        "numbers are not the embedding's: that head is used, as in transformers; tie_word_embeddings should be false",
    )


def _has_stacked_experts(moe: MoeSpec, headers: Collection[str]) -> bool:
    """Whether the experts of a layer are one tensor for each projection. Those of Gemma 4 are unless they are
    quantised, which is done to each by itself."""
    if moe.gelu:
        return not any(".experts.0.gate_proj." in name for name in headers)
    return moe.stacked or any(name.endswith(".mlp.experts.gate_up_proj") for name in headers)


def _architecture(config: JsonReader) -> str:
    """The first of `architectures` that is served, as the config has it."""
    architectures = config.strings("architectures")
    for name in architectures:
        if TEXT_PARTS.get(name, name) in FAMILIES:
            return name
    code = "; the code that the checkpoint brings along (auto_map) is not run" if config.given("auto_map") else ""
    raise CheckpointError(
        f"{config.where}: architectures is {shown(list(architectures))}; this server runs "
        + ", ".join([*TARGET_ARCHITECTURES, *TEXT_PARTS])
        + code
    )
