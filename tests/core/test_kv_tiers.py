"""KV in tiers, as the core sees it: who holds a block on its way, when it can be found, and what is loaded at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checks.core_state import check_slots
from dflash_backend.core.admission import RequestError
from dflash_backend.core.block_hashes import BlockHashes
from dflash_backend.core.kv import tiers as tiers_module
from dflash_backend.core.kv.groups import FullBlocks, RecurrentStates
from dflash_backend.core.kv.record_slots import KVTier, RecordSlots
from dflash_backend.core.kv.tiers import REFUSALS_BEFORE_PROBE, KVLoad, KVTiers
from dflash_backend.core.moves import DISK, HOST, Record
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import TierConfig, blocks_for
from dflash_backend.messages import BlocksRemoved, BlocksStored, EngineCoreOutputs, KVEvent
from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import lookup, make_config, make_request
from tests.core.toy_mover import ToyMover

PROMPT = [7 + i * i % 40 for i in range(41)]
OTHER = [3 + i * i % 37 for i in range(41)]
ALL = 1 << 30


class Tiered(CheckedEngine):
    """An engine with tiers, whose mover moves `halves` of records between two plans."""

    def __init__(self, names: tuple[str, ...] = (HOST,), slots: int = 100, **changes: Any) -> None:
        self.halves = ALL
        self.lost: Callable[[Record], bool] = lambda record: False
        mover = ToyMover(lambda: self.halves, lambda record: self.lost(record))
        config = make_config(**changes, tiers=tuple(TierConfig(name, (slots,) * 3) for name in names))
        super().__init__(config, None, mover)
        assert self.scheduler.kv.tiers is not None
        self.tiers: KVTiers = self.scheduler.kv.tiers
        (self.full,) = (group for group in self.tiers.groups if isinstance(group, FullBlocks))

    def answer(self, request_id: str, prompt: list[int], **sampling: Any) -> None:
        """Run a request alone to its end, and all moves."""
        self.run(make_request(request_id, prompt, **{"max_tokens": 4} | sampling))
        self.settle()

    def settle(self) -> None:
        """Let everything go to tiers that is to."""
        for _ in range(1000):
            if self.tiers.is_idle:
                return
            self.tiers.advance()
        raise AssertionError("moves that never end")

    def lose_device(self) -> None:
        """Let nothing be found on the device, nor be there."""
        self.scheduler.kv.reset_prefix_cache()
        for kv in (self.worker.target_kv, self.worker.drafter_kv):
            kv[:] = [99] * len(kv)

    def stored(self, prompt: list[int], tier: int = 0) -> list[bool]:
        """Which blocks of a prompt a tier has."""
        size, config = self.core.config.block_size, self.core.config
        count = (len(prompt) - config.reads_next_tokens) // size
        hashes = BlockHashes("", size, config.reads_next_tokens).first(count, prompt)
        return [self.tiers.tiers[tier].groups[0].slot(each) is not None for each in hashes[:count]]


DRAFTERS: dict[str, tuple[dict[str, Any], Callable[[int], int]]] = {
    "DFlash": ({"lookahead_base": 1}, lambda k: k + 1),
    "DSpark": ({"lookahead_base": 0}, lambda k: k),
    "EAGLE-3": ({"lookahead_base": 0, "autoregressive": True, "reads_next_tokens": True}, lambda k: 0),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("k", [7, 15, 16, 31, 32])
def test_a_load_holds_the_lookahead_of_a_block_drafter_and_none_of_an_autoregressive_one(
    name: str, block_size: int, k: int
) -> None:
    fields, lookahead = DRAFTERS[name]
    limits = {"max_model_len": 400, "drafter_max_len": 400, "num_speculative_tokens": k}
    engine = Tiered(block_size=block_size, num_blocks=40, **limits, **fields)
    prompt = [i % 47 for i in range(3 * block_size + 2)]
    engine.answer("first", prompt)
    engine.lose_device()
    engine.halves = 0
    engine.add(make_request("again", prompt, max_tokens=4))
    for _ in range(3):
        engine.step()
        assert list(engine.scheduler.loading) == ["again"]
        (held,) = engine.full.held.values()
        assert len(held) == 3 + blocks_for(lookahead(k), block_size)
        assert engine.pool.num_free == engine.pool.num_blocks - len(held)
        assert all(engine.pool.ref_count(block_id) == 1 for block_id in held)
        assert not any(map(engine.pool.is_cached, held)), "what is not all there can be found"
    engine.halves = ALL
    engine.finish()
    assert not engine.full.held
    assert engine.outputs["again"].stats.num_cached_tokens == 3 * block_size


@pytest.mark.parametrize("names", [(HOST,), (HOST, DISK)])
def test_others_decode_while_a_request_waits_for_its_kv(names: tuple[str, ...]) -> None:
    engine = Tiered(names)
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.halves = 0
    engine.add(make_request("waits", PROMPT, max_tokens=4), make_request("other", OTHER, max_tokens=20))
    engine.run_until_finished("other")
    assert list(engine.scheduler.loading) == ["waits"]
    assert engine.core.stats().num_requests_waiting == 1
    engine.halves = 1
    engine.finish()
    stats = engine.core.stats().tiers[HOST]
    assert stats.num_hit_tokens == engine.outputs["waits"].stats.num_cached_tokens == 40
    assert stats.num_bytes_loaded == 1000  # ten blocks of the toy's


def test_a_request_that_is_cancelled_leaves_its_load_to_end_and_no_block_is_lost() -> None:
    engine = Tiered()
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.halves = 3
    engine.add(make_request("leaves", PROMPT, max_tokens=4))
    engine.step()
    engine.abort("leaves")
    assert engine.pool.num_free < engine.pool.num_blocks, "the mover still writes"
    engine.settle()
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.halves = 0
    engine.add(make_request("again", PROMPT, max_tokens=4))
    engine.finish()  # all is on the device by now
    assert engine.outputs["again"].stats.num_cached_tokens == 40


def test_a_load_gives_way_before_a_running_request_is_preempted() -> None:
    engine = Tiered(num_blocks=20, max_model_len=80, drafter_max_len=80)
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.add(make_request("grows", OTHER[:5], max_tokens=60))
    engine.step()
    engine.halves = 1
    engine.add(make_request("waits", PROMPT, max_tokens=4))
    engine.step()
    assert list(engine.scheduler.loading) == ["waits"]
    engine.halves = 0
    engine.run_until_finished("grows")
    assert engine.core.stats().num_preemptions == 0
    assert engine.mover is not None
    assert engine.mover.num_cancelled == 1
    engine.finish()
    assert engine.outputs["waits"].finish_reason == "length"


def test_blocks_that_loads_hold_are_given_back_when_nothing_else_can_run() -> None:
    engine = Tiered(num_blocks=20, max_model_len=80, drafter_max_len=80, tenant_weights={})
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.halves = 0
    engine.add(make_request("waits", PROMPT, max_tokens=4))
    engine.step()
    # More urgent, and it needs the whole pool.
    engine.add(make_request("large", [i % 45 for i in range(60)], max_tokens=18, priority=1))
    engine.halves = ALL
    engine.finish()
    assert engine.outputs["large"].finish_reason == engine.outputs["waits"].finish_reason == "length"


def test_a_block_that_leaves_the_device_while_it_is_copied_is_not_taken() -> None:
    engine = Tiered(num_blocks=16, max_model_len=60, drafter_max_len=60)
    engine.halves = 0
    engine.run(make_request("first", PROMPT, max_tokens=4))
    engine.tiers.advance()
    engine.halves = 7  # three records and half of the fourth
    engine.tiers.advance()
    engine.halves = 0
    engine.run(make_request("other", OTHER, max_tokens=4))
    engine.halves = ALL
    engine.settle()
    engine.check_tiers()
    hashes = BlockHashes("", 4).first(10, PROMPT)
    still_there = [lookup(engine.pool, each) is not None for each in hashes]
    assert engine.stored(PROMPT) == still_there
    assert 2 < sum(still_there) < 8
    assert engine.core.stats().tiers[HOST].num_lost == still_there.count(False) + 1  # and the answer's block


def test_what_takes_less_time_to_compute_than_to_load_is_computed() -> None:
    engine = Tiered()
    engine.worker.target_s = lambda plan: 1e-4 * plan.num_tokens
    for number, (seconds_per_record, loads) in enumerate([(1e-5, True), (1e-2, False)]):
        prompt = [number, *PROMPT]
        engine.answer(f"first{number}", prompt)
        engine.lose_device()
        engine.tiers._seconds_per_byte[HOST] = seconds_per_record / 100
        engine.answer(f"again{number}", prompt)
        assert engine.outputs[f"again{number}"].stats.num_cached_tokens == (40 if loads else 0)
        assert engine.core.stats().tiers[HOST].num_computed == (not loads)


def test_one_slow_load_does_not_switch_a_tier_off() -> None:
    """After some refusals one load is made to measure the tier again. Where it is still slow, more are refused."""
    engine = Tiered()
    engine.worker.target_s = lambda plan: 1e-3 * plan.num_tokens
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.tiers._seconds_per_byte[HOST] = 1.0
    engine.tiers._max_refused[HOST] = 2 * REFUSALS_BEFORE_PROBE
    cached = []
    for number in range(2 * REFUSALS_BEFORE_PROBE + 3):
        engine.answer(f"again{number}", PROMPT)
        engine.lose_device()
        cached.append(engine.outputs[f"again{number}"].stats.num_cached_tokens)
    assert cached == [*[0] * 2 * REFUSALS_BEFORE_PROBE, 40, 40, 40]
    assert engine.tiers._seconds_per_byte[HOST] < 1e-4, "what a probe measures is the rate"


def test_a_tier_that_stays_slow_is_probed_less_and_less() -> None:
    engine = Tiered()
    load = KVLoad(1, Request.from_generation_request(make_request("r", PROMPT), engine.core.config, 0, 0.0), 0, 10)
    wanted = {(0, b"hash"): HOST}
    engine.tiers._bytes_per_record[0] = 100
    probes = []
    for number in range(200):
        engine.tiers._seconds_per_byte[HOST] = 1.0
        if engine.tiers._pays(load, wanted, 1e-6, 0.0):
            probes.append(number)
    first = REFUSALS_BEFORE_PROBE
    assert probes == [first, 3 * first + 1, 7 * first + 2]


@pytest.mark.parametrize("num_copies", [1, 2, 4])
def test_a_load_writes_to_no_copy_of_a_state_that_a_request_of_the_same_plan_starts_from(num_copies: int) -> None:
    """A mover is a thread of its own: a load may end before the step begins, whose requests copy their states then."""
    engine = Tiered(num_state_snapshots=num_copies, num_blocks=80)
    prompts = [[i + 1, *((i + 3) * j % 37 for j in range(40))] for i in range(num_copies + 1)]
    for number, prompt in enumerate(prompts):
        engine.answer(f"first{number}", prompt)
    (states,) = (group for group in engine.tiers.groups if isinstance(group, RecurrentStates))
    there = [states.slot(BlockHashes("", 4).first(10, prompt)[9]) for prompt in prompts]
    assert sorted(there, key=lambda slot: slot is None) == [*there[1:], None], "all but the first"
    assert engine.mover is not None
    engine.mover.at_once = True
    again = [make_request(f"again{i}", prompt, max_tokens=4) for i, prompt in enumerate([*prompts[1:], prompts[0]])]
    engine.add(*again)
    engine.finish()
    cached = [engine.outputs[each.request_id].stats.num_cached_tokens for each in again]
    assert cached == [*[40] * num_copies, 0], "the last one has no copy to take the place of, and computes its prompt"


def test_requests_with_the_same_prefix_load_it_once() -> None:
    engine = Tiered()
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.halves = 2
    requests = [make_request(f"r{i}", [*PROMPT, i], max_tokens=4) for i in range(4)]
    engine.add(*requests)
    engine.step()
    assert len(engine.scheduler.loading) == 4
    engine.finish()
    assert engine.core.stats().tiers[HOST].num_bytes_loaded == 1000
    assert [engine.outputs[each.request_id].stats.num_cached_tokens for each in requests] == [40] * 4


def test_a_plan_lets_a_bounded_number_of_requests_wait_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for the blocks of a long prompt takes time, and many may begin alike."""
    monkeypatch.setattr(tiers_module, "MAX_BLOCKS_SOUGHT", 25)
    engine = Tiered(max_queue_size=8, max_num_seqs=4)
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.halves = 0
    requests = [make_request(f"r{i}", [*PROMPT, i], max_tokens=4) for i in range(12)]
    engine.add(*requests)
    for num_loading in (3, 6, 9, 12):
        engine.step()
        assert len(engine.scheduler.loading) == num_loading
    with pytest.raises(RequestError, match="12 requests wait already and max_queue_size is 8"):
        engine.add(make_request("more", PROMPT))
    engine.halves = ALL
    engine.finish()
    assert [engine.outputs[each.request_id].stats.num_cached_tokens for each in requests] == [40] * 12


def test_what_there_is_not_to_load_is_looked_for_once() -> None:
    engine = Tiered()
    engine.answer("first", PROMPT)
    request = Request.from_generation_request(make_request("r", OTHER), engine.core.config, 0, 0.0)
    num_searches = [0]
    reach = engine.tiers._reach

    def counted(*args: Any) -> int:
        num_searches[0] += 1
        return reach(*args)

    engine.tiers._reach = counted  # type: ignore[method-assign]
    for _ in range(3):
        assert not engine.tiers.begin(request, [], 0.0, 0.0)
    assert num_searches == [1]
    engine.answer("other", OTHER)
    engine.lose_device()
    assert engine.tiers.begin(request, [], 0.0, 0.0)
    engine.tiers.release(request)
    engine.settle()


def test_a_request_computes_what_a_tier_does_not_give() -> None:
    engine = Tiered((HOST, DISK))
    engine.answer("first", PROMPT)
    engine.lose_device()
    hashes = BlockHashes("", 4).first(10, PROMPT)
    engine.lost = lambda record: record.block_hash == hashes[6]
    before = engine.core.stats().tiers[HOST].num_bytes_stored
    engine.answer("again", PROMPT)
    assert engine.outputs["again"].stats.num_cached_tokens == 24
    engine.lose_device()
    # It was computed and stored again, and nothing else was.
    assert engine.core.stats().tiers[HOST].num_bytes_stored == before + 100
    engine.lost = lambda record: False
    engine.answer("third", PROMPT)
    assert engine.outputs["third"].stats.num_cached_tokens == 40


def test_the_tail_of_a_prompt_leaves_a_tier_before_its_head() -> None:
    engine = Tiered(slots=14)
    engine.answer("first", PROMPT)
    assert engine.stored(PROMPT) == [True] * 10
    engine.answer("other", OTHER[:20])
    found = engine.stored(PROMPT)
    assert 0 < sum(found) < 10
    assert found == sorted(found, reverse=True)


def test_what_was_found_stays_in_a_tier_longer_than_what_was_not() -> None:
    engine = Tiered(slots=30, num_blocks=100)
    engine.answer("first", PROMPT)
    engine.lose_device()
    engine.answer("found", PROMPT)
    for number in range(6):
        engine.answer(f"once{number}", [number, *OTHER])
    assert engine.stored(PROMPT) == [True] * 10


def test_a_prompt_that_is_found_on_the_device_stays_in_the_tier_too() -> None:
    engine = Tiered(slots=30, num_blocks=100)
    engine.answer("first", PROMPT)
    for number in range(6):
        engine.answer(f"once{number}", [number, *OTHER[:20]])
        assert engine.stored(PROMPT) == [True] * 10
        engine.answer(f"again{number}", PROMPT)


def test_records_from_before_the_start_are_found_and_those_too_many_are_removed() -> None:
    mover = ToyMover()
    hashes = BlockHashes("", 4).first(10, PROMPT)
    mover.brought = [(0, b"old"), *((0, each) for each in reversed(hashes)), (7, b"of no group")]
    tiers = KVTiers(make_config(tiers=(TierConfig(HOST, (10,)), TierConfig(DISK, (10,)))), mover)
    assert [tiers.tiers[1].groups[0].slot(each) is not None for each in hashes] == [True] * 10
    assert mover.removed == [b"old", b"of no group"]


def test_events_say_in_which_medium_a_block_is() -> None:
    engine = Tiered((HOST, DISK), slots=12, kv_events="hashes")
    events: list[KVEvent] = []
    step = engine.core.step

    def listened() -> EngineCoreOutputs:
        outputs = step()
        events.extend(outputs.kv_events)
        return outputs

    engine.core.step = listened  # type: ignore[method-assign]
    for number, prompt in enumerate((PROMPT, OTHER)):
        engine.answer(str(number), prompt)
        events += engine.core.advance_moves().kv_events
    hashes = BlockHashes("", 4).first(10, PROMPT)
    for medium in ("GPU", "CPU", "DISK"):
        stored = [each for event in events if event.medium == medium for each in event.block_hashes]
        assert set(hashes) <= set(stored), medium
    known: dict[str, set[bytes]] = {"CPU": set(), "DISK": set()}
    for event in events:
        if event.medium != "GPU":
            assert not isinstance(event, BlocksStored) or (event.parent, event.token_ids) == (None, [])
            change = known[event.medium]
            (change.update if isinstance(event, BlocksStored) else change.difference_update)(event.block_hashes)
    assert any(isinstance(event, BlocksRemoved) and event.medium == "CPU" for event in events)
    for tier, medium in enumerate(("CPU", "DISK")):
        assert len(known[medium]) == engine.tiers.tiers[tier].num_records


def test_host_memory_that_is_too_small_for_a_prompt_still_passes_all_of_it_on_to_the_disk() -> None:
    """What it has waits there until it is on the disk; the rest waits on the device."""
    engine = Tiered((HOST, DISK), slots=100)
    engine.tiers.tiers[0] = KVTier.of(TierConfig(HOST, (3,)))
    engine.answer("first", PROMPT)
    assert engine.stored(PROMPT, tier=1) == [True] * 10
    engine.lose_device()
    engine.answer("again", PROMPT)
    assert engine.outputs["again"].stats.num_cached_tokens == 40


def test_a_disk_that_is_slower_than_eviction_leaves_host_memory_to_new_prompts() -> None:
    engine = Tiered((HOST, DISK), slots=100, num_blocks=30)
    assert engine.mover is not None
    engine.mover.stuck = lambda move: move.target == DISK
    prompts = [[number, *PROMPT[1:]] for number in range(25)]
    for number, prompt in enumerate(prompts):
        engine.run(make_request(str(number), prompt, max_tokens=4))
        for _ in range(20):
            engine.tiers.advance()
        engine.check_tiers()
    assert not any(map(any, map(engine.stored, prompts[4:10]))), "only what the disk is stuck with stays"
    assert sum(map(sum, map(engine.stored, prompts[15:]))) >= 40
    engine.mover.stuck = lambda move: False
    engine.settle()
    assert any(any(engine.stored(prompt, tier=1)) for prompt in prompts[15:])


def test_no_search_passes_what_is_read() -> None:
    slots = RecordSlots(100)
    names = [bytes([number]) for number in range(100)]
    for name in names:
        slots.reserve(name)
        slots.settle(name, is_there=True)
    for name in names[:99]:
        slots.pin(name)
    assert list(slots._unused) == names[99:]
    assert len(slots) == 100
    slots.touch(names[3], reused=True)
    slots.unpin(names[4])
    slots.unpin(names[3])
    assert (list(slots._unused), list(slots._used)) == ([names[99], names[4]], [names[3]])
    slots.remove(names[5])  # it is read, and was not there
    assert slots.slot(names[5]) is None
    slots.unpin(names[5])
    check_slots(slots, [])


def test_a_place_that_is_read_is_not_given_away() -> None:
    slots = RecordSlots(2)
    for name in (b"a", b"b"):
        assert slots.reserve(name) is not None
        slots.settle(name, is_there=True)
    slots.pin(b"a")
    assert slots.reserve(b"c") == (1, b"b")
    assert slots.reserve(b"d") is None
    slots.unpin(b"a")
    assert slots.reserve(b"d") == (0, b"a")


@pytest.mark.parametrize("names", [(), (HOST,)])
def test_without_tiers_there_is_nothing_of_them(names: tuple[str, ...]) -> None:
    config = make_config(tiers=tuple(TierConfig(name, (9,)) for name in names), enable_prefix_caching=bool(not names))
    engine = CheckedEngine(config, None, ToyMover())
    assert engine.scheduler.kv.tiers is None
    assert not engine.core.is_moving
    assert engine.pool._removed is None
    assert engine.core.stats().tiers == {}
