"""Sampling defaults that a checkpoint recommends in its `generation_config.json`, as vLLM's setting of that name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.text.sampling_params import ParameterError, parse_sampling_params

# Hugging Face's names to ours; vLLM takes the same ones.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """The sampling defaults of `generation_config.json` by our names; empty without that file. Raises `CheckpointError`
    for a value that is not allowed."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: it is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it must be a JSON object")
    defaults = {ours: data[theirs] for theirs, ours in _NAMES.items() if data.get(theirs) is not None}
    try:
        parse_sampling_params(defaults, max_speculative_tokens=None)
    except ParameterError as error:
        raise CheckpointError(f"{path}: {error}; set generation_config to none to leave it out") from None
    return defaults
