"""Target decoders and the DFlash draft model: our own lean implementations over paged attention."""

from dflash_backend.models.decoder import load_target, target_patterns
from dflash_backend.models.dflash import DFlashModel, draft_patterns
from dflash_backend.models.interface import TargetModel, TargetOutput

__all__ = ["DFlashModel", "TargetModel", "TargetOutput", "draft_patterns", "load_target", "target_patterns"]
