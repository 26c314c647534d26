"""What steps report of the prefix cache: replayed, it is what the cache holds."""

from __future__ import annotations

import msgspec
import pytest

from dflash_backend.core.block_hashes import BlockHashes
from dflash_backend.core.kv.block_pool import KVEventLog
from dflash_backend.messages import BlocksRemoved, BlocksStored, KVEvent
from tests.core.toy_engine import PROMPT, Engine, crowd, make_config, make_request


class Listening(Engine):
    """An engine whose reported events are kept, and followed."""

    def __init__(self, lag: int | None = None, **changes: object) -> None:
        super().__init__(make_config(**changes), lag)
        self.events: list[KVEvent] = []
        self.known: set[bytes] = set()
        step = self.core.step

        def followed():
            outputs = step()
            for event in outputs.kv_events:
                if isinstance(event, BlocksStored):
                    assert self.known.isdisjoint(event.block_hashes), "a block is stored twice"
                    self.known.update(event.block_hashes)
                else:
                    assert self.known.issuperset(event.block_hashes), "a block is removed that was not stored"
                    self.known.difference_update(event.block_hashes)
            self.events += outputs.kv_events
            assert self.known == self.pool._cached.keys()
            return outputs

        self.core.step = followed


@pytest.mark.parametrize("lag", [None, 1])
def test_events_followed_in_order_are_the_cache_at_each_step(lag: int | None) -> None:
    engine = Listening(lag, num_blocks=20, kv_events="hashes")
    for name in range(4):
        requests = [msgspec.structs.replace(one, request_id=f"{name}/{one.request_id}") for one in crowd()]
        for number, request in enumerate(requests):
            request.prompt_token_ids[:0] = [100 + 7 * name, number]
        engine.run(*requests)
    kinds = {type(event) for event in engine.events}
    assert kinds == {BlocksStored, BlocksRemoved}, "the pool was too large to evict"
    assert not any(event.token_ids for event in engine.events if isinstance(event, BlocksStored))


def test_stored_blocks_name_their_tokens_and_the_block_before_them() -> None:
    engine = Listening(kv_events="tokens")
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    engine.add(make_request("a", prompt, max_tokens=12))
    engine.steps(30)
    stored = [event for event in engine.events if isinstance(event, BlocksStored)]
    token_ids = [token for event in stored for token in event.token_ids]
    whole = [*prompt, *engine.outputs["a"].token_ids]
    assert token_ids == whole[: len(token_ids)]
    assert len(token_ids) >= 36
    hashes = BlockHashes("", 4).first(len(token_ids) // 4, whole)
    assert [one for event in stored for one in event.block_hashes] == list(hashes)
    assert [event.parent for event in stored] == [
        None if event.block_hashes[0] == hashes[0] else hashes[hashes.index(event.block_hashes[0]) - 1]
        for event in stored
    ]
    # Another text that goes on differently: its event names only what is new, behind what is there.
    before = len(engine.events)
    engine.add(make_request("b", [*prompt[:8], 90, 91, 92, 93, 94], max_tokens=2))
    engine.steps(10)
    (new,) = engine.events[before:]
    assert (new.parent, new.token_ids) == (hashes[1], [90, 91, 92, 93])


def test_a_drafter_that_reads_the_next_token_has_other_hashes_which_who_asks_can_compute() -> None:
    engine = Listening(kv_events="hashes", reads_next_tokens=True)
    prompt = [*PROMPT, *PROMPT]
    engine.add(make_request("a", prompt, max_tokens=1))
    engine.steps(5)
    assert engine.known == set(BlockHashes("", 4, reads_next_tokens=True).first(4, prompt))


def test_without_the_setting_nothing_is_reported() -> None:
    engine = Engine(make_config(num_blocks=20))
    engine.add(*crowd())
    for _ in range(200):
        assert engine.core.step().kv_events == []
    assert engine.scheduler.kv.events is None


def test_a_block_that_leaves_between_two_blocks_of_a_text_keeps_its_place() -> None:
    log = KVEventLog()
    log.stored(b"a", None, [])
    log.stored(b"b", b"a", [])
    log.removed(b"x")
    log.removed(b"a")
    log.stored(b"c", b"b", [])
    log.removed(b"c")
    log.stored(b"d", b"b", [])
    log.stored(b"e", b"a", [])
    assert log.take() == [
        BlocksStored([b"a", b"b"]),
        BlocksRemoved([b"x", b"a"]),
        BlocksStored([b"c"], b"b"),
        BlocksRemoved([b"c"]),
        BlocksStored([b"d"], b"b"),
        BlocksStored([b"e"], b"a"),
    ]
    assert log.take() == []
