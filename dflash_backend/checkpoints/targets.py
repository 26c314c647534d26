"""Target checkpoints: Hugging Face directories of the architectures that `models.registry` can run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_backend.checkpoints.decoder_fields import (
    Family,
    check_stack,
    mistral_windows,
    no_windows,
    qwen_moe_windows,
    qwen_windows,
    read_decoder,
    read_dtype,
    read_eos,
    read_moe,
)
from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.files import check_files, weight_files
from dflash_backend.checkpoints.headers import read_headers
from dflash_backend.checkpoints.json_reader import JsonReader, shown
from dflash_backend.checkpoints.spec import TargetSpec

MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"

QWEN3 = Family(windows=qwen_windows, num_kv_heads=32, head_dim=128, reads_attention_bias=True)
LLAMA = Family(windows=no_windows, max_positions=2048, reads_attention_bias=True, reads_mlp_bias=True)

# Kept here, not in models, so that a wrong architecture is refused before torch is imported. A test holds the names
# equal to the keys of `models.registry`.
FAMILIES = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen2ForCausalLM": Family(windows=qwen_windows, num_kv_heads=32),
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": Family(windows=mistral_windows, num_kv_heads=8, max_positions=131072),
    MOE_ARCHITECTURE: Family(windows=qwen_moe_windows, num_kv_heads=4, reads_attention_bias=True),
}
TARGET_ARCHITECTURES = tuple(FAMILIES)


def read_target(directory: Path) -> TargetSpec:
    """Read a target's `config.json`. Raises `CheckpointError`."""
    check_files(directory)
    config = JsonReader.load(directory / "config.json")
    architecture = _architecture(config)
    decoder = read_decoder(config, FAMILIES[architecture])
    if architecture == MOE_ARCHITECTURE:
        decoder = dataclasses.replace(decoder, moe=read_moe(config, decoder.num_layers))
    check_stack(config, decoder, "model.layers.", read_headers(weight_files(directory)))
    return TargetSpec(
        path=directory,
        architecture=architecture,
        decoder=decoder,
        vocab_size=config.integer("vocab_size", low=2),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        dtype=read_dtype(config),
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
