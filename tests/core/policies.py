"""Policies of speculation that know what drafts are worth, for the tests of what they decide."""

from __future__ import annotations

import random

import numpy as np

from dflash_backend.core.scheduler_config import DrafterWork
from dflash_backend.core.speculation.costs import CostTable, StepLine
from dflash_backend.core.speculation.policy import FIRST_STEPS, AdaptiveSpeculation
from tests.core.step_shapes import BLOCKS, decode_shape

K = 7


def accepted_of(rng: random.Random, rates: list[float]) -> int:
    return next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))


def step_s(line: StepLine, num_drafts: int, num_drafting: int, num_queries: int, num_passes: int = 1) -> float:
    """Seconds of a step that verifies `num_drafts` drafts, and drafts where `num_drafting` is not 0."""
    draft_s = line.draft_s(num_drafting, num_queries, num_passes) if num_drafting else 0.0
    return float(line.verify_s(num_drafts) + draft_s)


def policy_with(
    chances: list[float], table: CostTable, draft_s: float = 0.0, work: DrafterWork = BLOCKS
) -> AdaptiveSpeculation:
    policy = AdaptiveSpeculation(len(chances), work, table=table)
    policy.acceptance.trials = np.full(len(chances), 1e6)
    policy.acceptance.accepted = 1e6 * np.array(chances)
    policy.acceptance.variance = 0.0
    policy.acceptance._update_rates()
    policy.stats.num_steps = len(FIRST_STEPS)
    policy.costs.observe(decode_shape(1, 1, work=work), table.at(2), draft_s or 1e-9)
    return policy
