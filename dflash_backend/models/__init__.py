"""Target decoders: our own lean implementations over paged attention."""

from dflash_backend.models.decoder import load_target, target_patterns
from dflash_backend.models.interface import TargetModel, TargetOutput

__all__ = ["TargetModel", "TargetOutput", "load_target", "target_patterns"]
