"""Target decoders and the DFlash draft model: our own lean implementations over paged attention."""

from dflash_backend.models.decoder import target_patterns
from dflash_backend.models.dflash import DFlashModel, draft_patterns
from dflash_backend.models.interface import TargetModel, TargetOutput
from dflash_backend.models.registry import TARGETS, load_target

__all__ = [
    "TARGETS",
    "DFlashModel",
    "TargetModel",
    "TargetOutput",
    "draft_patterns",
    "load_target",
    "target_patterns",
]
