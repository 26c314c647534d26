"""Target checkpoints: Hugging Face directories of the architectures that `models.registry` can run."""

from __future__ import annotations

from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import read_decoder, read_dtype, read_eos
from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import TargetSpec

# Kept here, not in models, so that a wrong architecture is refused before torch is imported. A test holds it equal
# to the keys of `models.registry`.
TARGET_ARCHITECTURES = ("Qwen3ForCausalLM",)


def read_target(directory: Path) -> TargetSpec:
    """Read a target's `config.json`. Raises `CheckpointError`."""
    config = JsonReader.load(directory / "config.json")
    architectures = config.strings("architectures")
    architecture = next((name for name in architectures if name in TARGET_ARCHITECTURES), None)
    if architecture is None:
        raise CheckpointError(
            f"{config.where}: architectures is {list(architectures)}; this server runs "
            + ", ".join(TARGET_ARCHITECTURES)
        )
    if config.boolean("use_sliding_window", default=False):
        raise config.fail("use_sliding_window", "false: sliding-window targets are not supported")
    return TargetSpec(
        path=directory,
        architecture=architecture,
        decoder=read_decoder(config),
        vocab_size=config.integer("vocab_size", low=2),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(config),
        eos_token_ids=read_eos(directory),
    )
