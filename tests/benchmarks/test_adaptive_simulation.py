"""The rule for drafts on a simulated device: one stream, where it decides most seldom."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.adaptive.simulation import ALIKE, K, h200_costs, misses, simulation_of
from dflash_backend.core.speculation.policy import AdaptiveSpeculation

# Decisions that hold too long cost 5 percent; the standard error of this mean is 1 percent.
NUM_SEEDS, NUM_STEPS, LEAST = 24, 1000, 0.975


@pytest.mark.nightly
def test_one_stream_has_nearly_what_the_best_number_of_drafts_gives() -> None:
    ratios = []
    for seed in range(NUM_SEEDS):
        run, policy = simulation_of(1, ALIKE, seed), AdaptiveSpeculation(K, table=h200_costs().table(0.1, seed))
        ratios.append(run.run(policy, NUM_STEPS) / run.run(K, NUM_STEPS))
    assert statistics.mean(ratios) > LEAST


def test_a_ratio_below_the_bound_is_a_miss_by_name() -> None:
    rows = [[1, "15", "5", "5", "4", "0.979", "1.0", "1.0"], [8, "15", "5", "5", "4", "0.980", "0.5", "0.5"]]
    assert misses(rows) == ["1 streams: the rule has 0.979 of the best fixed k, below 0.98"]
