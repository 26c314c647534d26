"""Drafters: what proposes the tokens that the target verifies."""

from dflash_backend.drafters.base import DraftBatch, Drafter
from dflash_backend.drafters.dflash.drafter import DFlashDrafter

__all__ = ["DFlashDrafter", "DraftBatch", "Drafter"]
