"""How many tokens each row drafts: the policy, and the estimates that it learns. Others import from here."""

from dflash_backend.core.speculation.costs import CostTable, StepShape
from dflash_backend.core.speculation.policy import AdaptiveSpeculation, SpeculatingRow

__all__ = ["AdaptiveSpeculation", "CostTable", "SpeculatingRow", "StepShape"]
