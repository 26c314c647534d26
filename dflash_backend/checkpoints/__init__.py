"""A model directory or hub id, read into a normalised `TargetSpec` or `DraftSpec`.

This is the edge: formats, layer conventions and defaults are settled here and nowhere else. Importing it costs no
torch; `weights` and `mask_embedding`, which read tensors, do.
"""

from dflash_backend.checkpoints.describe import draft_facts, target_facts
from dflash_backend.checkpoints.families import TARGET_ARCHITECTURES
from dflash_backend.checkpoints.pairing import check_pair
from dflash_backend.checkpoints.resolve import ModelPair, find_model, read_draft, resolve_pair, resolve_target_dir
from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec, DraftSpec, RopeSpec, TargetSpec
from dflash_backend.checkpoints.targets import read_target

__all__ = [
    "TARGET_ARCHITECTURES",
    "CheckpointError",
    "DecoderSpec",
    "DraftSpec",
    "ModelPair",
    "RopeSpec",
    "TargetSpec",
    "check_pair",
    "draft_facts",
    "find_model",
    "read_draft",
    "read_target",
    "resolve_pair",
    "resolve_target_dir",
    "target_facts",
]
