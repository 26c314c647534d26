"""The simulated fleet of `benchmarks.router`, with few replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import router
from benchmarks.router import FEWEST, MAX_IMBALANCE, POLICIES, ROUND_ROBIN, ROUTER, Fleet, Outcome, simulate

# 32 tenants, each with a prefix of 32 to 64 blocks: more than twice one replica's cache, and less than all caches.
FLEET = Fleet(4, 4000, num_prefixes=32, prefix_blocks=(32, 64), blocks_per_replica=640, requests_per_s=40.0, skew=0.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {policy: simulate(FLEET, policy) for policy in POLICIES}


def test_the_router_finds_more_than_twice_what_blind_routing_finds(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[ROUTER].hit_rate > 2 * outcomes[ROUND_ROBIN].hit_rate
    assert outcomes[ROUTER].hit_rate > 2 * outcomes[FEWEST].hit_rate


def test_the_router_keeps_the_replicas_balanced(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[ROUTER].imbalance < MAX_IMBALANCE


def test_hits_are_within_3_percent_of_one_replica_with_all_the_cache(outcomes: dict[str, Outcome]) -> None:
    one = replace(FLEET, num_replicas=1, blocks_per_replica=4 * FLEET.blocks_per_replica)
    assert outcomes[ROUTER].hit_rate > 0.97 * simulate(one, ROUND_ROBIN).hit_rate


def test_a_simulation_gives_the_same_again(outcomes: dict[str, Outcome]) -> None:
    again = simulate(FLEET, ROUTER)
    measured = {"decision_mean_s": 0.0, "decision_p99_s": 0.0, "reports_mean_s": 0.0}
    assert replace(again, **measured) == replace(outcomes[ROUTER], **measured)


def test_a_missed_bound_is_named(outcomes: dict[str, Outcome]) -> None:
    slow = replace(outcomes[ROUTER], decision_mean_s=1e-3, imbalance=9.0, hit_rate=0.1)
    missed = router._missed({ROUTER: slow, ROUND_ROBIN: outcomes[ROUND_ROBIN]})
    assert len(missed) == 3
    assert "1000.0 us" in missed[0]
