"""Target checkpoints: Hugging Face directories of the architectures in `families.FAMILIES`."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import check_stack, read_decoder, read_dtype, read_eos
from dflash_backend.checkpoints.families import FAMILIES, TARGET_ARCHITECTURES
from dflash_backend.checkpoints.files import check_files, read_headers
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import read_quantization
from dflash_backend.checkpoints.spec import CheckpointError, TargetSpec
from dflash_backend.error_text import shown


def read_target(directory: Path) -> TargetSpec:
    """Read a target's `config.json`. Raises `CheckpointError`."""
    check_files(directory)
    config = JsonReader.load(directory / "config.json")
    architecture = _architecture(config)
    read_quantization(config)  # refused before anything else is read
    decoder = read_decoder(config, FAMILIES[architecture])
    headers = read_headers(directory)
    check_stack(config, decoder, "model.layers.", headers)
    return TargetSpec(
        path=directory,
        architecture=architecture,
        decoder=decoder,
        vocab_size=config.integer("vocab_size", low=2),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(config, embedding=headers.get("model.embed_tokens.weight")),
        eos_token_ids=read_eos(directory),
    )


def _architecture(config: JsonReader) -> str:
    architectures = config.strings("architectures")
    for name in architectures:
        if name in FAMILIES:
            return name
    code = "; the code that the checkpoint brings along (auto_map) is not run" if config.given("auto_map") else ""
    raise CheckpointError(
        f"{config.where}: architectures is {shown(list(architectures))}; this server runs "
        + ", ".join(TARGET_ARCHITECTURES)
        + code
    )
