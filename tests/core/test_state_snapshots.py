"""Which copies of recurrent states can be found, which are given away first, and where prefills are cut for them."""

from __future__ import annotations

import random

import pytest

from checks.core_state import check_slots
from dflash_backend.core.kv.groups import RecurrentStates
from dflash_backend.core.kv.record_slots import RecordSlots
from tests.core.toy_engine import Engine, make_config, make_request
from tests.support.scale import scaled


def filled(num_slots: int, *names: str) -> RecordSlots:
    found = RecordSlots(num_slots)
    for name in names:
        assert found.reserve(name.encode()) is not None
        found.settle(name.encode(), is_there=True)
    return found


def test_a_copy_is_found_once_it_is_published() -> None:
    states = RecurrentStates(2, 4)
    slot, _ = states.snapshots.reserve(b"b") or (None, None)
    assert states.longest([b"a", b"b", b"c"], 3) == 0
    states.snapshots.settle(b"b", is_there=True)
    assert states.longest([b"a", b"b", b"c"], 3) == 2
    assert states.longest([b"a", b"b", b"c"], 1) == 0
    assert states.slot(b"b") == slot is not None


def test_a_block_has_one_copy() -> None:
    snapshots = filled(3, "a")
    assert snapshots.reserve(b"a") is None
    assert snapshots.reserve(b"b") is not None
    assert snapshots.reserve(b"b") is None
    snapshots.settle(b"b", is_there=False)
    assert snapshots.reserve(b"b") is not None


def test_those_never_used_are_given_away_first_then_the_longest_unused() -> None:
    snapshots = filled(4, "a", "b", "c", "d")
    for name in (b"a", b"b", b"a"):
        snapshots.touch(name, reused=True)
    gone = []
    for new in (b"1", b"2", b"3", b"4"):
        assert snapshots.reserve(new) is not None
        there = [name for name in (b"a", b"b", b"c", b"d") if snapshots.slot(name) is not None]
        gone.append(({b"a", b"b", b"c", b"d"} - set(there) - set(gone)).pop())
    assert gone == [b"c", b"d", b"b", b"a"]
    assert snapshots.reserve(b"5") is None  # all are pending


def test_not_all_slots_go_to_those_that_were_used() -> None:
    snapshots = filled(4, "a", "b", "c", "d")
    for name in (b"a", b"b", b"c", b"d"):
        snapshots.touch(name, reused=True)
    check_slots(snapshots, [])
    assert snapshots.reserve(b"new") is not None
    assert [snapshots.slot(name) is not None for name in (b"a", b"b", b"c", b"d")] == [False, True, True, True]


def test_the_version_tells_when_a_lookup_may_come_out_otherwise() -> None:
    snapshots = RecordSlots(1)
    versions = [snapshots.version]
    snapshots.reserve(b"a")
    assert snapshots.version == versions[0]
    snapshots.settle(b"a", is_there=True)
    versions.append(snapshots.version)
    snapshots.reserve(b"b")
    versions.append(snapshots.version)
    assert versions == sorted(set(versions))


@pytest.mark.parametrize("seed", range(scaled(20)))
def test_no_slot_is_lost_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    snapshots, names, pending = RecordSlots(rng.randint(0, 6)), [bytes([i]) for i in range(12)], []
    for _ in range(300):
        name = rng.choice(names)
        action = rng.randrange(4)
        if action == 0 and snapshots.reserve(name) is not None:
            pending.append(name)
        elif action == 1 and pending:
            snapshots.settle(pending.pop(rng.randrange(len(pending))), is_there=True)
        elif action == 2 and pending:
            snapshots.settle(pending.pop(rng.randrange(len(pending))), is_there=False)
        elif action == 3 and snapshots.slot(name) is not None:
            snapshots.touch(name, reused=True)
        check_slots(snapshots, pending)


def chunks(engine: Engine, name: str) -> list[tuple[int, int, bool]]:
    """Where each row of a request's prefill started, its tokens, and whether its state was copied."""
    rows = [(row, plan) for plan in engine.worker.plans for row in plan.rows if row.request_id == name]
    prefill = [(row, plan) for row, plan in rows if row.num_new > 1 or not row.num_computed]
    return [(row.num_computed, row.num_new, name in plan.snapshot_slots) for row, plan in prefill]


def run(engine: Engine, name: str, prompt: list[int]) -> list[tuple[int, int, bool]]:
    engine.add(make_request(name, prompt, max_tokens=3))
    while engine.core.has_unfinished():
        engine.step()
    return chunks(engine, name)


def test_a_prompt_is_cut_before_its_end_and_where_it_leaves_earlier_ones() -> None:
    engine = Engine(make_config(num_blocks=200, block_size=4, max_num_batched_tokens=100, num_state_snapshots=4))
    shared = list(range(1, 25))  # 6 blocks
    first, second, third = (shared + [tail] * 14 for tail in (30, 31, 32))
    # 38 tokens: the last block that the same prompt could start behind ends at 36.
    assert run(engine, "first", first) == [(0, 36, True), (36, 2, False)]
    # Its blocks are cached up to 24, and no copy is there.
    assert run(engine, "second", second) == [(0, 24, True), (24, 12, True), (36, 2, False)]
    assert run(engine, "third", third) == [(24, 12, True), (36, 2, False)]
    assert run(engine, "again", first) == [(36, 2, False)]
    outputs = engine.outputs
    assert outputs["again"].token_ids == outputs["first"].token_ids


def test_short_prompts_are_not_cut() -> None:
    engine = Engine(make_config(num_blocks=200, block_size=4, max_num_batched_tokens=100, num_state_snapshots=4))
    assert run(engine, "short", list(range(1, 17))) == [(0, 16, False)]
    assert run(engine, "long", list(range(1, 18))) == [(0, 16, True), (16, 1, False)][:1]


def test_without_slots_nothing_is_cut_and_nothing_is_hit() -> None:
    engine = Engine(make_config(num_blocks=200, block_size=4, max_num_batched_tokens=100, num_state_snapshots=0))
    prompt = list(range(1, 39))
    assert run(engine, "first", prompt) == run(engine, "again", prompt) == [(0, 38, False)]


def test_an_emptied_prefix_cache_has_no_copies_of_states() -> None:
    engine = Engine(make_config(num_blocks=200, block_size=4, max_num_batched_tokens=100, num_state_snapshots=4))
    prompt = list(range(1, 39))
    whole = [(0, 36, True), (36, 2, False)]
    assert run(engine, "first", prompt) == whole
    engine.core.scheduler.kv.reset_prefix_cache()
    assert run(engine, "second", prompt) == whole
    assert run(engine, "third", prompt) == [(36, 2, False)]
