"""Sampling defaults that a checkpoint recommends in its `generation_config.json`, as vLLM's setting of that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.text.sampling_params import ParameterError, parse_sampling_params

# Hugging Face's names to ours; vLLM takes the same ones.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NAMES = {**dict(zip(_SAME, _SAME, strict=True)), "max_new_tokens": "max_tokens"}


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """The sampling defaults of `generation_config.json` by our names; empty without that file. Raises `CheckpointError`
    for a value that is not allowed."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    data = JsonReader.load(path).data
    defaults = {ours: data[theirs] for theirs, ours in _NAMES.items() if data.get(theirs) is not None}
    try:
        parse_sampling_params(defaults, max_speculative_tokens=None)
    except ParameterError as error:
        raise CheckpointError(f"{path}: {error}; set generation_config to none to leave it out") from None
    return defaults
