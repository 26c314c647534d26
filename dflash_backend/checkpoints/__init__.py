"""A model directory or hub id, read into a normalised `TargetSpec`; what drafters read of theirs with the same means.

This is the edge: formats, layer conventions and defaults are settled here and nowhere else. Importing it costs no
torch; `weights`, which reads tensors, does.
"""

from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.checkpoints.families import TARGET_ARCHITECTURES
from dflash_backend.checkpoints.find import find_model
from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec, RopeSpec, TargetSpec
from dflash_backend.checkpoints.targets import read_target

__all__ = [
    "TARGET_ARCHITECTURES",
    "CheckpointError",
    "DecoderSpec",
    "RopeSpec",
    "TargetSpec",
    "find_model",
    "read_target",
    "target_facts",
]
