"""Drafter checkpoints of the speculators library, of any method.

They have the method in `speculators_model_type`, the decoder's own config in `transformer_layer_config`, layers named
by boundary ids, and often the target's name, so that such a directory given alone is enough.
"""

from __future__ import annotations

from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import refuse_nested
from dflash_backend.checkpoints.tensor_names import SPECULATORS

MODEL_TYPE = SPECULATORS
# The library nests these in `transformer_layer_config`; where they stand at the top level, vLLM lets those win.
TOP_LEVEL_WINDOWS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def is_speculators(config: JsonReader) -> bool:
    """Whether `config.json` was written by the speculators library, for a method of any kind."""
    return config.given(MODEL_TYPE)


def verifier_name(config: JsonReader) -> str | None:
    """The target that a drafter was made for, a path or a hub id; None where the checkpoint does not say."""
    verifier = config.object("speculators_config").object("verifier")
    return verifier.string("name_or_path", default="") or None


def layer_config(config: JsonReader) -> JsonReader:
    """`transformer_layer_config`, with the fields of windows that stand at the top level in place of its own."""
    layer = config.object("transformer_layer_config", required=True)
    refuse_nested(layer)
    outer = {field: config.data[field] for field in TOP_LEVEL_WINDOWS if config.given(field)}
    return JsonReader({**layer.data, **outer}, layer.where)
