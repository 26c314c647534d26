"""Drafting, verification and sampling: everything between the target's logits and the tokens that stand."""

from dflash_backend.speculative.dflash import DFlashDrafter
from dflash_backend.speculative.drafter import DraftBlock, Drafter
from dflash_backend.speculative.sampling import SamplingRows

__all__ = ["DFlashDrafter", "DraftBlock", "Drafter", "SamplingRows"]
