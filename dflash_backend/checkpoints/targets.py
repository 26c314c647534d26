"""Target checkpoints: Hugging Face directories of the architectures in `families.FAMILIES`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import check_stack, read_decoder, read_dtype, read_eos
from dflash_backend.checkpoints.families import FAMILIES, TARGET_ARCHITECTURES, TEXT_PARTS
from dflash_backend.checkpoints.files import check_files, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import read_quantization
from dflash_backend.checkpoints.spec import CheckpointError, MoeSpec, TargetSpec
from dflash_backend.error_text import shown

# How the tensors of images and sound begin in multimodal checkpoints.
OTHER_PARTS = (
    "model.visual.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
)


def read_target(directory: Path) -> TargetSpec:
    """Read a target's `config.json`. Raises `CheckpointError`."""
    check_files(directory)
    config = JsonReader.load(directory / "config.json")
    architecture = _architecture(config)
    read_quantization(config)  # refused before anything else is read
    # A multimodal model has the text part's fields and tensors one level down.
    nested = config.given("text_config")
    text = config.object("text_config") if nested else config
    prefix = "model.language_model." if nested else "model."
    decoder = read_decoder(text, FAMILIES[architecture])
    headers = read_headers(directory)
    check_stack(text, decoder, f"{prefix}layers.", headers)
    if decoder.moe is not None:
        decoder = replace(decoder, moe=replace(decoder.moe, stacked=_has_stacked_experts(decoder.moe, headers)))
    return TargetSpec(
        path=directory,
        architecture=architecture,
        decoder=decoder,
        vocab_size=text.integer("vocab_size", low=2),
        tie_word_embeddings=_is_tied(config, text, FAMILIES[architecture].tied),
        dtype=read_dtype(text, config, embedding=headers.get(f"{prefix}embed_tokens.weight")),
        eos_token_ids=read_eos(directory),
        prefix=prefix,
        left_out=OTHER_PARTS if nested else (),
    )


def _has_stacked_experts(moe: MoeSpec, headers: Collection[str]) -> bool:
    """Whether the experts of a layer are one tensor for each projection. Those of Gemma 4 are unless they are
    quantised, which is done to each by itself."""
    if moe.gelu:
        return not any(".experts.0.gate_proj." in name for name in headers)
    return moe.stacked or any(name.endswith(".mlp.experts.gate_up_proj") for name in headers)


def _is_tied(config: JsonReader, text: JsonReader, missing: bool) -> bool:
    """Whether the head is the embedding: as the file says, else as its text part does."""
    return config.boolean("tie_word_embeddings", default=text.boolean("tie_word_embeddings", default=missing))


def _architecture(config: JsonReader) -> str:
    architectures = config.strings("architectures")
    for name in architectures:
        if TEXT_PARTS.get(name, name) in FAMILIES:
            return TEXT_PARTS.get(name, name)
    code = "; the code that the checkpoint brings along (auto_map) is not run" if config.given("auto_map") else ""
    raise CheckpointError(
        f"{config.where}: architectures is {shown(list(architectures))}; this server runs "
        + ", ".join([*TARGET_ARCHITECTURES, *TEXT_PARTS])
        + code
    )
