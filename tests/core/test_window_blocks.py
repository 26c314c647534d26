"""Blocks of layers with a window: which a hit needs, and when a request gives them back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.core.admission import check_config
from dflash_backend.core.kv import KVManager
from dflash_backend.core.kv.groups import RecurrentStates, WindowBlocks
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig, WindowGroup
from tests.core.toy_engine import Engine, fewest_window_blocks, make_config, make_request

NAMES = [bytes([i]) for i in range(10)]
# A request whose blocks have these hashes.
NAMED: Any = SimpleNamespace(block_hashes=SimpleNamespace(first=lambda num_blocks, token_ids: NAMES), token_ids=[])


def windows(window: int = 6, num_blocks: int = 20) -> WindowBlocks:
    return WindowBlocks(WindowGroup(num_blocks, 4, window, max_step_tokens=8, max_lookahead=4))


def cached(found: WindowBlocks, *indices: int) -> None:
    """Publish blocks with these places in a text."""
    for index in indices:
        (block_id,) = found.pool.allocate(1)
        found.pool.publish(block_id, NAMES[index])


def config(**changes: Any) -> SchedulerConfig:
    """Windows of 6 positions in blocks of 4, and steps of 16 tokens."""
    limits = make_config(**{"sliding_window": 6, "max_num_batched_tokens": 16} | changes)
    return make_config(
        **{"sliding_window": 6, "max_num_batched_tokens": 16, "num_window_blocks": fewest_window_blocks(limits)}
        | changes
    )


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [(1, 0, 0), (1, 4, 1), (6, 8, 0), (6, 9, 1), (6, 12, 1), (6, 13, 2), (5, 8, 1), (100, 99, 0)],
)
def test_a_block_is_visible_while_its_last_position_is_less_than_a_window_away(
    window: int, position: int, first: int
) -> None:
    assert windows(window)._group.first_visible(position) == first


def test_a_hit_needs_the_blocks_that_its_first_query_sees_and_no_others() -> None:
    found = windows()  # behind block 7 the query at 32 sees from 27 on: blocks 6 and 7
    cached(found, 6, 7)
    assert found.longest(NAMES, 8) == 8
    assert len(found.own_hit(NAMED, 8)) == 2
    assert found.longest(NAMES, 7) == 0  # behind block 6 those of 5 and 6, and before them nothing
    cached(found, 0, 2, 3)
    assert found.longest(NAMES, 7) == 4
    assert found.longest(NAMES, 3) == 1
    assert found.longest(NAMES, 0) == 0


def test_a_hit_without_its_last_block_ends_before_it() -> None:
    found = windows()
    cached(found, 0, 1, 2, 3)
    assert found.longest(NAMES, 5) == 4
    assert found.own_hit(NAMED, 4) == [found.pool.find_chain([name], 1)[0] for name in NAMES[2:4]]


def test_a_window_of_one_position_needs_no_block_for_a_hit() -> None:
    assert windows(window=1).longest(NAMES, 8) == 8
    assert windows(window=1).own_hit(NAMED, 8) == []


def test_a_hit_ends_where_every_group_of_layers_lets_it() -> None:
    """All blocks are cached for the layers without a window, 0, 2 and 3 for those with one, and there are copies of the
    state after 3 blocks and after 1. Windows allow 4 blocks, states 3 of them, windows 1 of those."""
    limits = config(num_blocks=64, max_model_len=200, num_state_snapshots=4)
    manager = KVManager(limits)
    request = Request.from_generation_request(make_request("r", list(range(1, 34))), limits, 0, 0.0)
    hashes = request.block_hashes.first(8, request.token_ids)
    _, with_window, states = manager.groups
    assert isinstance(with_window, WindowBlocks)
    assert isinstance(states, RecurrentStates)
    for pool, indices in ((manager.pool, range(8)), (with_window.pool, (0, 2, 3))):
        for index in indices:
            (block_id,) = pool.allocate(1)
            pool.publish(block_id, hashes[index])
    for num_blocks in (1, 3):
        assert states.snapshots.reserve(hashes[num_blocks - 1]) is not None
        states.snapshots.settle(hashes[num_blocks - 1], is_there=True)
    assert manager.find_hit(request) == manager.pool.find_chain(hashes, 1)
    assert request.num_cached_blocks == 8


def test_a_long_request_holds_few_blocks_however_long_it_is() -> None:
    engine = Engine(config(num_blocks=64, max_model_len=200))
    engine.add(make_request("long", list(range(1, 101)), max_tokens=90))
    most_of_window = most = 0
    while engine.core.has_unfinished():
        engine.step()
        for request in engine.scheduler.running.values():
            most_of_window = max(most_of_window, len(request.window_block_ids) - request.num_window_freed)
            most = max(most, len(request.block_ids))
    group = engine.core.config.window_group
    assert group is not None
    assert most > 45
    assert most_of_window <= group.most_blocks < 17
    assert engine.outputs["long"].finish_reason == "length"


def test_a_prompt_is_found_again_although_most_of_its_blocks_were_given_back() -> None:
    engine = Engine(config(num_blocks=64, max_model_len=200))
    prompt = list(range(1, 102))
    for name in ("first", "again"):
        engine.add(make_request(name, prompt, max_tokens=2))
        while engine.core.has_unfinished():
            engine.step()
    stats = engine.outputs["again"].stats
    assert stats is not None
    assert stats.num_cached_tokens == 100
    assert engine.outputs["again"].token_ids == engine.outputs["first"].token_ids


def test_what_the_other_layers_have_is_no_hit_once_the_blocks_of_the_window_are_gone() -> None:
    few = config(num_blocks=64, max_model_len=200)
    engine = Engine(few)
    for name, first in (("first", 1), ("other", 2), ("again", 1)):
        engine.add(make_request(name, [first, *range(3, 104)], max_tokens=2))
        while engine.core.has_unfinished():
            engine.step()
    stats = engine.outputs["again"].stats
    assert stats is not None
    assert engine.window_pool is not None
    assert engine.window_pool.num_evicted > 0
    assert stats.num_cached_tokens < 100
    assert engine.outputs["again"].token_ids == engine.outputs["first"].token_ids


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    least = config()
    check_config(least)
    with pytest.raises(
        ValueError, match="layers with a window of 6 positions have 13 KV blocks, and a request holds up to"
    ):
        check_config(config(num_window_blocks=13))


def test_usage_is_that_of_the_pool_with_fewer_blocks_left() -> None:
    engine = Engine(config(num_blocks=64, max_model_len=200))
    engine.add(make_request("one", list(range(1, 30)), max_tokens=20))
    engine.step()
    assert engine.window_pool is not None
    assert engine.core.stats().kv_cache_usage == engine.window_pool.usage > engine.pool.usage > 0


def test_a_table_grows_in_every_pool_or_in_none() -> None:
    """Each pool in turn has a block less than a row needs."""
    limits = config(num_blocks=64, max_model_len=200)
    for index in (0, 1):
        manager = KVManager(limits)
        pools = [manager.pool, manager.groups[1].pool]  # type: ignore[attr-defined]
        request = Request.from_generation_request(make_request("r", list(range(1, 34))), limits, 0, 0.0)
        pools[index].allocate(pools[index].num_free - 1)
        before = [pool.num_free for pool in pools]
        row = ScheduledRequest("r", 0, 8, 0, False, 0, [], num_positions=8)
        assert not manager.reserve(request, row)
        assert [pool.num_free for pool in pools] == before
        assert request.block_ids == []
        assert row.new_block_ids == row.new_window_block_ids == []
        row = ScheduledRequest("r", 0, 4, 0, False, 0, [], num_positions=4)
        assert manager.reserve(request, row)
        assert [pool.num_free for pool in pools] == [free - 1 for free in before]
