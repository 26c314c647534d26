"""The block pool: who gets which block, what can be found again, and in which order it is given up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from checks.core_state import check_pool
from dflash_backend.core.kv.block_pool import PROTECTED_LIFE_IN_POOLS, BlockPool
from tests.core.toy_engine import lookup


def _cached_then_freed(pool: BlockPool, *names: bytes) -> list[int]:
    """Allocate a block for each name, publish it, and free them together as one request's blocks."""
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        assert pool.publish(block_id, name)
    pool.free(block_ids)
    return block_ids


def test_a_new_pool_is_free_and_unused() -> None:
    pool = BlockPool(4)
    assert (pool.num_free, pool.usage) == (4, 0.0)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert (pool.num_free, pool.usage) == (0, 1.0)


def test_more_than_is_free_is_an_error_that_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(ValueError, match="3 KV blocks were asked for and 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_unused_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = _cached_then_freed(pool, b"a", b"b")
    assert set(pool.allocate(2)).isdisjoint(cached)
    assert lookup(pool, b"a") == cached[0]


def test_the_longest_free_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    (first,) = _cached_then_freed(pool, b"first")
    (second,) = _cached_then_freed(pool, b"second")
    (third,) = _cached_then_freed(pool, b"third")
    pool.touch([first], reused=False)
    pool.free([first])
    assert pool.allocate(3) == [second, third, first]
    assert lookup(pool, b"first") is None


def _use_again(pool: BlockPool, *block_ids: int) -> None:
    pool.touch(block_ids)
    pool.free(block_ids)


def _cold_prompts(pool: BlockPool, numbers: range) -> None:
    """Cache a block for each number, which no later request asks for."""
    for number in numbers:
        _cached_then_freed(pool, b"cold %d" % number)


@pytest.mark.parametrize(
    ("found", "num_cold", "kept"),
    [(True, 3 * 16, True), (False, 16, False), (True, (PROTECTED_LIFE_IN_POOLS + 2) * 16, False)],
    ids=["found", "not found, and the pool was filled once", "found long ago"],
)
def test_a_block_that_was_found_outlives_cold_ones_for_a_while(found: bool, num_cold: int, kept: bool) -> None:
    pool = BlockPool(16)
    shared = _cached_then_freed(pool, b"a", b"b")
    if found:
        _use_again(pool, *shared)
    _cold_prompts(pool, range(num_cold))
    assert [lookup(pool, b"a"), lookup(pool, b"b")] == (shared if kept else [None, None])


def test_a_found_block_that_is_found_again_in_time_stays_for_good() -> None:
    pool = BlockPool(16)
    shared = _cached_then_freed(pool, b"a")
    for start in range(0, 20 * 16, 32):
        _use_again(pool, *shared)
        _cold_prompts(pool, range(start, start + 32))
    assert lookup(pool, b"a") == shared[0]


def test_found_blocks_leave_a_quarter_of_the_pool_to_new_prompts() -> None:
    pool = BlockPool(16)
    _use_again(pool, *_cached_then_freed(pool, *[b"hot %d" % index for index in range(16)]))
    _cold_prompts(pool, range(8))
    assert [lookup(pool, b"cold %d" % number) is not None for number in range(8)] == [False] * 4 + [True] * 4
    assert sum(lookup(pool, b"hot %d" % index) is not None for index in range(16)) == 12
    assert lookup(pool, b"hot 0") is not None, "it was the tails that had to go"


def test_hot_blocks_are_given_out_when_there_are_no_others() -> None:
    pool = BlockPool(4)
    blocks = _cached_then_freed(pool, b"a", b"b", b"c")
    _use_again(pool, *blocks)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert lookup(pool, b"a") is None


def test_a_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    head, middle, tail = _cached_then_freed(pool, b"head", b"middle", b"tail")
    assert pool.allocate(2) == [tail, middle]
    assert lookup(pool, b"head") == head


def test_a_touched_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    first, second = _cached_then_freed(pool, b"a", b"b")
    pool.touch([first])
    assert pool.allocate(1) == [second]
    assert (pool.num_free, pool.ref_count(first)) == (0, 1)


def test_a_shared_block_is_free_only_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"a")
    pool.touch([block_id])
    pool.free([block_id])
    assert pool.num_free == 0
    pool.free([block_id])
    assert pool.num_free == 1


def test_the_first_block_with_a_digest_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"same")
    assert not pool.publish(second, b"same")
    assert lookup(pool, b"same") == first
    pool.free([second])
    assert pool.allocate(1) == [second], "the unpublished copy is freed as an unused block"


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not cached"):
        pool.touch([block_id])
    pool.free([block_id])
    with pytest.raises(ValueError, match="is freed and not held"):
        pool.free([block_id])
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(block_id, b"a")


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls leaves counts, free lists and cache map in agreement with the tables that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.tables.append(self.pool.allocate(count))

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]), reused=st.booleans())
    def share(self, name: bytes, reused: bool) -> None:
        block_id = lookup(self.pool, name)
        if block_id is not None:
            self.pool.touch([block_id], reused)
            self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if not self.pool.is_cached(block_id):
            known = lookup(self.pool, name)
            assert self.pool.publish(block_id, name) == (known is None)
            assert lookup(self.pool, name) == (block_id if known is None else known)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool, self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
