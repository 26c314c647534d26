"""A prompt that one engine computes and another goes on with, as the cores see it: who holds its blocks, for how long,
and what happens where they do not come. The toys check every position that is read by its content."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_backend.core.kv.groups import FullBlocks
from dflash_backend.core.kv.manager import FETCH_S
from dflash_backend.core.kv.tiers import MAX_TOLD
from dflash_backend.core.kv.transfer import KeptForOthers
from dflash_backend.core.moves import REMOTE, Peer
from dflash_backend.core.scheduler import MAX_LOAD_WAIT_S
from dflash_backend.core.scheduler_config import TransferConfig, blocks_for
from dflash_backend.messages import KVTransferParams
from tests.core.checked_engine import CheckedEngine
from tests.core.test_kv_tiers import DRAFTERS, OTHER, PROMPT
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_mover import ToyMover, ToySender
from tests.support.scale import SCALE, scaled

ALL = 1 << 30
NUM_RANDOM = scaled(2_000 if SCALE >= 4 else 40)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 6, "num_window_blocks": 60},
    "recurrent": {"num_state_snapshots": 4},
}


class Server(CheckedEngine):
    """An engine of one role, and a mover that moves `halves` of records between two plans."""

    def __init__(self, role: str, *, timeout_s: float = 60.0, **changes: Any) -> None:
        self.halves = ALL
        mover = ToyMover(lambda: self.halves)
        mover.sender = ToySender() if role == "prefill" else None
        transfer = TransferConfig(role == "prefill", role == "decode", timeout_s)
        super().__init__(make_config(**changes, transfer=transfer), None, mover)
        tiers = self.scheduler.kv.tiers
        assert tiers is not None
        self.tiers = tiers
        if tiers.kept is not None:
            tiers.kept._clock = self.clock
        (self.full,) = (group for group in tiers.groups if isinstance(group, FullBlocks))
        self.answered: dict[str, KVTransferParams | None] = {}

    def take(self, deltas: list[Any]) -> None:
        super().take(deltas)
        self.answered |= {delta.request_id: delta.kv_transfer_params for delta in deltas if delta.finish_reason}

    @property
    def kept(self) -> KeptForOthers:
        """What a prefill server keeps."""
        assert self.tiers.kept is not None
        return self.tiers.kept

    def prefill(self, prompt: list[int], name: str = "prefill", **sampling: Any) -> KVTransferParams | None:
        """Compute a prompt for another server; returns what that is told."""
        params = KVTransferParams(do_remote_decode=True)
        self.run(make_request(name, prompt, max_tokens=1, kv_transfer_params=params, **sampling))
        self.core.collect_drafts()
        self.tiers.advance()
        return self.answered[name]

    def settle(self) -> None:
        """Let everything move that is to."""
        for _ in range(1000):
            self.tiers.advance()
            if self.tiers.is_idle:
                return
        raise AssertionError("moves that never end")


def pair(**changes: Any) -> tuple[Server, Server]:
    """A prefill and a decode server."""
    first, second = Server("prefill", **changes), Server("decode", **changes)
    assert first.mover is not None
    assert second.mover is not None
    second.mover.keepers[1] = first.mover
    return first, second


def is_empty(server: Server) -> bool:
    """Whether no request and nothing that is kept or loaded has a block."""
    return server.pool.num_free == server.pool.num_blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reads_next", [False, True])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_decode_server_goes_on_where_the_prefill_server_was(kind: str, reads_next: bool, length: int) -> None:
    first, second = pair(**KINDS[kind], reads_next_tokens=reads_next)
    prompt = PROMPT[:length]
    params = first.prefill(prompt)
    num_blocks = (length - 1) // 4
    if kind == "recurrent" and num_blocks < 4:
        assert params is None, "a state after so few blocks is not copied"
        return
    assert params is not None
    assert (params.do_remote_prefill, params.num_blocks, params.tp_size) == (True, num_blocks, 1)
    assert first.pool.num_free == first.pool.num_blocks - num_blocks
    second.run(make_request("decode", prompt, max_tokens=12, kv_transfer_params=params))
    stats = second.outputs["decode"].stats
    assert stats is not None
    assert (stats.num_cached_tokens, stats.num_loaded_tokens) == (4 * num_blocks, {REMOTE: 4 * num_blocks})
    first.settle()
    assert is_empty(first)
    assert is_empty(second)
    assert (first.kept.stats.num_kept, first.kept.stats.num_taken, first.kept.stats.num_expired) == (1, 1, 0)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_load_from_another_server_holds_the_lookahead_of_a_block_drafter_and_none_of_an_autoregressive_one(
    name: str, block_size: int
) -> None:
    fields, lookahead = DRAFTERS[name]
    k = block_size - 1  # k + 1 positions fill a block, k a block less one position
    limits = {"max_model_len": 400, "drafter_max_len": 400, "num_speculative_tokens": k, "max_num_batched_tokens": 400}
    first, second = pair(block_size=block_size, num_blocks=40, **limits, **fields)
    prompt = [i % 47 for i in range(3 * block_size + 2)]
    params = first.prefill(prompt)
    second.halves = 0
    second.add(make_request("decode", prompt, max_tokens=4, kv_transfer_params=params))
    for _ in range(3):
        second.step()
        assert list(second.scheduler.loading) == ["decode"]
        (held,) = second.full.held.values()
        assert len(held) == 3 + blocks_for(lookahead(k), block_size)
        assert not any(map(second.pool.is_cached, held)), "what is not all there can be found"
    second.halves = ALL
    second.finish()
    assert second.outputs["decode"].stats.num_cached_tokens == 3 * block_size


def test_others_decode_while_kv_comes_from_another_server() -> None:
    first, second = pair()
    params = first.prefill(PROMPT)
    second.halves = 0
    second.add(
        make_request("waits", PROMPT, max_tokens=4, kv_transfer_params=params),
        make_request("other", OTHER, max_tokens=20),
    )
    second.run_until_finished("other")
    assert list(second.scheduler.loading) == ["waits"]
    second.halves = 1
    second.finish()
    assert second.outputs["waits"].stats.num_cached_tokens == 40


def test_a_load_that_does_not_end_holds_up_nobody_who_needs_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(num_blocks=33)
    params = first.prefill(PROMPT)
    assert second.mover is not None
    monkeypatch.setattr(second.mover, "wait", lambda timeout_s: None)  # as long as nothing comes
    second.halves = 0
    second.add(make_request("hangs", PROMPT, max_tokens=4, kv_transfer_params=params))
    second.step()
    second.add(make_request("other", [i % 37 for i in range(100)], max_tokens=4))
    for _ in range(3):
        second.step()
        assert list(second.scheduler.loading) == ["hangs"]
    second.clock.advance(MAX_LOAD_WAIT_S)
    second.finish()
    assert second.outputs["hangs"].stats.num_cached_tokens == 0
    assert is_empty(second)


def test_what_is_given_up_while_it_is_read_is_computed() -> None:
    """The prefill server's requests have taken the blocks: what was read of them may be of any text."""
    first, second = pair(num_blocks=33)
    params = first.prefill(PROMPT)
    second.halves = 3
    second.add(make_request("decode", PROMPT, max_tokens=8, kv_transfer_params=params))
    second.step()
    first.run(*(make_request(f"r{i}", [i, *OTHER], max_tokens=60, seed=i) for i in range(3)))
    assert first.kept.stats.num_expired == 1
    second.finish()
    stats = second.outputs["decode"].stats
    assert (stats.num_cached_tokens, stats.num_loaded_tokens) == (0, {})
    assert is_empty(second)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_request_that_runs_alone_gets_the_blocks_of_all_that_is_kept(kind: str) -> None:
    """Of a prompt that was kept twice the first one to be let go gives no block: the other one holds them still."""
    window = {"sliding_window": 6, "num_window_blocks": 33}
    first = Server("prefill", num_blocks=33, **window if kind == "window" else {})
    for number in range(2):
        first.prefill(PROMPT, f"prefill{number}")
    assert len(first.kept) == 2
    first.run(make_request("long", OTHER[:10], max_tokens=118))
    assert first.kept.stats.num_expired == 2
    assert first.core.stats().num_preemptions == 0
    assert is_empty(first)


def test_no_request_is_preempted_before_all_that_is_kept_is_let_go() -> None:
    first = Server("prefill", num_blocks=36)
    for number in range(3):
        first.prefill(PROMPT[: 21 + 4 * number], f"prefill{number}")
    first.run(*(make_request(f"r{i}", [i, *OTHER[:9]], max_tokens=60, seed=i) for i in range(2)))
    assert first.kept.stats.num_expired == 3
    assert first.core.stats().num_preemptions == 0


def test_kept_kv_gives_way_to_a_request_that_waits_beside_one_that_runs() -> None:
    """The oldest goes first, and no more than it takes; what a decode server may just ask for stays."""
    first = Server("prefill", num_blocks=36)
    for number in range(3):
        first.prefill([number, *PROMPT[:39]], f"prefill{number}")
        first.clock.advance(0.1)
    first.add(make_request("runs", OTHER[:5], max_tokens=8, seed=1))
    first.step()
    first.add(make_request("waits", OTHER[:30], max_tokens=4, seed=2))
    first.clock.advance(FETCH_S - 0.35)
    first.step()
    assert len(first.kept) == 3
    assert list(first.scheduler.running) == ["runs"]
    first.clock.advance(0.1)
    first.step()
    assert {"runs", "waits"} == set(first.scheduler.running)
    assert first.kept.stats.num_expired == 1
    assert first.core.stats().num_preemptions == 0


def test_what_is_kept_goes_before_a_request_is_preempted_for_another_tenant() -> None:
    first = Server("prefill", num_blocks=36)
    for number in range(2):
        first.prefill([number, *PROMPT[:39]], f"prefill{number}")
    first.add(*(make_request(f"r{i}", [i, *OTHER[:9]], max_tokens=40, seed=i, tenant="many") for i in range(3)))
    for _ in range(2):
        first.step()
    first.add(make_request("other", OTHER[:30], max_tokens=4, seed=9, tenant="few"))
    first.step()
    assert "other" in first.scheduler.running
    assert first.core.stats().num_preemptions == 0
    first.finish()


def test_a_server_that_cannot_be_reached_leaves_the_prompt_to_be_computed() -> None:
    first, second = pair()
    params = first.prefill(PROMPT)
    assert second.mover is not None
    second.mover.keepers.clear()
    second.run(make_request("decode", PROMPT, max_tokens=8, kv_transfer_params=params))
    assert second.outputs["decode"].stats.num_cached_tokens == 0
    assert is_empty(second)


def test_what_nobody_fetches_is_kept_for_so_long_and_no_longer() -> None:
    first = Server("prefill", timeout_s=60.0)
    first.prefill(PROMPT)
    first.clock.advance(59.0)
    first.settle()
    assert len(first.kept) == 1
    said = first.core.advance_moves().stats
    assert said is not None
    assert said.kv_cache_usage > 0
    assert first.core.advance_moves().stats is None, "counts are said now and then"
    first.clock.advance(1.0)
    said = first.core.advance_moves().stats
    assert said is not None, "an engine without requests says that its blocks are free"
    assert (said.kv_cache_usage, said.kept.num_expired) == (0, 1)
    assert is_empty(first)


@pytest.mark.parametrize("end", ["found", "cancelled"])
def test_a_decode_server_says_what_it_does_not_need(end: str) -> None:
    first, second = pair()
    params = first.prefill(PROMPT)
    request = make_request("decode", PROMPT, max_tokens=8, kv_transfer_params=params)
    if end == "found":
        second.run(make_request("before", PROMPT, max_tokens=4))
        second.run(request)
    else:
        second.add(request)
        second.abort("decode")
    second.settle()
    first.settle()
    assert is_empty(first)
    assert first.kept.stats.num_taken == 1
    assert not second.core.stats().tiers[REMOTE].num_hit_tokens


def test_servers_that_are_not_reached_are_told_of_a_bounded_number_of_prompts() -> None:
    first, second = pair()
    params = first.prefill(PROMPT)
    second.halves = 0
    for number in range(MAX_TOLD + 3):
        second.add(make_request(f"r{number}", PROMPT, max_tokens=4, kv_transfer_params=params))
        second.abort(f"r{number}")
    assert len(second.tiers._moves) == MAX_TOLD
    second.halves = ALL
    second.settle()
    second.add(make_request("last", PROMPT, max_tokens=4, kv_transfer_params=params))
    second.abort("last")
    assert len(second.tiers._moves) == 1
    second.settle()


def test_kept_kv_is_found_by_who_knows_the_whole_prompt_and_its_salt() -> None:
    first, second = pair()
    params = first.prefill(PROMPT, cache_salt="a")
    for name, prompt, salt in (("other text", [1, *PROMPT[1:]], "a"), ("other salt", PROMPT, "b")):
        second.run(make_request(name, prompt, max_tokens=4, cache_salt=salt, kv_transfer_params=params))
        assert second.outputs[name].stats.num_cached_tokens == 0
    second.run(make_request("same", PROMPT, max_tokens=4, cache_salt="a", kv_transfer_params=params))
    assert second.outputs["same"].stats.num_loaded_tokens == {REMOTE: 40}


def test_a_prompt_that_two_ask_for_is_kept_for_both() -> None:
    first, second = pair()
    for name in ("one", "two"):
        params = first.prefill(PROMPT, name)
    assert len(first.kept) == 2
    second.run(make_request("a", PROMPT, max_tokens=4, kv_transfer_params=params))
    first.settle()
    assert len(first.kept) == 1
    second.run(make_request("b", PROMPT, max_tokens=4, kv_transfer_params=params))
    second.settle()
    first.settle()
    assert is_empty(first)


def test_a_prompt_is_read_once_the_step_that_computed_it_has_drafted() -> None:
    """Its first token and its parameters are out before."""
    first, second = pair()
    params = KVTransferParams(do_remote_decode=True)
    first.add(make_request("prefill", PROMPT, max_tokens=1, kv_transfer_params=params))
    while "prefill" not in first.answered:
        first.take(first.core.step().deltas)
    second.add(make_request("decode", PROMPT, max_tokens=8, kv_transfer_params=first.answered["prefill"]))
    for _ in range(3):
        second.step()
        assert list(second.scheduler.loading) == ["decode"]
    first.core.collect_drafts()
    first.tiers.advance()
    second.finish()
    assert second.outputs["decode"].stats.num_cached_tokens == 40


def test_a_failed_step_takes_back_what_it_was_to_write_of_what_is_kept() -> None:
    """Its drafter's KV is missing: the answer is out, and nobody may read it."""
    first, second = pair()
    first.worker.fails_to_draft = lambda plan: True
    params = KVTransferParams(do_remote_decode=True)
    first.add(make_request("prefill", PROMPT, max_tokens=1, kv_transfer_params=params))
    first.step()
    first.worker.fails_to_draft = lambda plan: False
    given = first.answered["prefill"]
    assert given is not None
    while first.core.has_unfinished():
        first.step()
    first.tiers.advance()
    second.run(make_request("decode", PROMPT, max_tokens=8, kv_transfer_params=given))
    assert second.outputs["decode"].stats.num_cached_tokens == 0
    first.settle()
    assert is_empty(first)


def test_a_failed_step_leaves_the_kv_that_queued_requests_are_to_fetch() -> None:
    first, second = pair(max_num_seqs=1)
    params = first.prefill(PROMPT)
    second.add(make_request("runs", [1, 2, 3], max_tokens=20))
    second.step()
    second.add(make_request("queued", PROMPT, max_tokens=8, kv_transfer_params=params))
    failing = iter([True])
    second.worker.fails = lambda plan: next(failing, False)
    second.finish()
    assert second.worker.num_failed == 1
    assert second.outputs["queued"].stats.num_cached_tokens == 40
    second.settle()
    first.settle()
    assert is_empty(first)


def test_without_a_role_the_parameters_change_nothing() -> None:
    engine = CheckedEngine(make_config())
    for name, params in (
        ("prefill", KVTransferParams(do_remote_decode=True)),
        ("decode", KVTransferParams(do_remote_prefill=True, remote_host="a", remote_port=1, remote_block_ids=(1,))),
    ):
        engine.run(make_request(name, PROMPT, max_tokens=4, kv_transfer_params=params))
    assert engine.scheduler.kv.tiers is None


@pytest.mark.parametrize("kind", KINDS)
def test_random_prompts_of_two_servers_with_few_blocks(kind: str) -> None:
    """Any order of prefills, decodes, cancellations and waits, with blocks for few of them: every position that is read
    is what its text says, and in the end no block is lost."""
    rng = random.Random(len(kind))
    changes = {"num_blocks": 40, "max_num_seqs": 3} | KINDS[kind]
    first, second = pair(**changes, timeout_s=8.0)
    stems = [[rng.randrange(40) for _ in range(50)] for _ in range(3)]
    offers: list[tuple[list[int], KVTransferParams]] = []
    num_loaded = 0
    for number in range(NUM_RANDOM):
        second.halves = rng.choice([0, 1, 5, ALL])
        prompt = [*rng.choice(stems)[: rng.randint(10, 50)], rng.randrange(40)]
        if rng.random() < 0.6 and (params := first.prefill(prompt, f"p{number}")) is not None:
            offers.append((prompt, params))
        if offers and rng.random() < 0.1:
            offers.pop()  # nobody comes for it
        if offers and rng.random() < 0.8:
            prompt, params = offers.pop(rng.randrange(len(offers)))
            second.add(make_request(f"d{number}", prompt, max_tokens=rng.randint(1, 12), kv_transfer_params=params))
        for _ in range(rng.randrange(6)):
            second.step()
            first.tiers.advance()
        if second.requests and rng.random() < 0.1:
            second.abort(rng.choice(list(second.requests)[-4:]))
        first.clock.advance(rng.choice([0.0, 0.5, 3.0]))
    second.halves = ALL
    second.finish()
    num_loaded = second.core.stats().tiers[REMOTE].num_hit_tokens
    first.clock.advance(10.0)
    first.settle()
    second.settle()
    assert is_empty(first)
    assert is_empty(second)
    assert num_loaded > NUM_RANDOM // 4  # much is cached on the device
    assert min(first.kept.stats.num_taken, first.kept.stats.num_expired) > 0


def test_a_peer_is_named_by_the_last_block_that_it_keeps() -> None:
    first, second = pair()
    params = first.prefill(PROMPT)
    assert params is not None
    second.add(make_request("decode", PROMPT, max_tokens=4, kv_transfer_params=params))
    request = second.scheduler.waiting["decode"]
    assert second.tiers.remote is not None
    assert second.tiers.remote.peer(request) == Peer("toy", 1, request.block_hashes.first(10, PROMPT)[9])
    second.finish()
