"""A model directory or hub id, read into a normalised `TargetSpec` or `DraftSpec`.

This is the edge: formats, layer conventions and defaults are settled here and nowhere else. Importing it costs no
torch; `weights` reads tensors and is imported by `models`.
"""

from dflash_backend.checkpoints.errors import CheckpointError
from dflash_backend.checkpoints.resolve import ModelPair, resolve_pair, resolve_target_dir
from dflash_backend.checkpoints.spec import DecoderSpec, DraftSpec, RopeSpec, TargetSpec

__all__ = [
    "CheckpointError",
    "DecoderSpec",
    "DraftSpec",
    "ModelPair",
    "RopeSpec",
    "TargetSpec",
    "resolve_pair",
    "resolve_target_dir",
]
