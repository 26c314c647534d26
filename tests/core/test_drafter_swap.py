"""A drafter that takes the place of another one while requests run: when, what is counted, and when it goes again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from checks.core_state import check_core
from dflash_backend.core.admission import RequestError
from dflash_backend.core.drafter_swap import MIN_BLOCKS, Acceptance, DrafterSwap, SwapEndsEngine
from dflash_backend.messages import DrafterSwapped, SwapDrafter
from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import crowd, make_config, make_request

MODES = pytest.mark.parametrize("lag", [None, 1, 2], ids=["no overlap", "lag 1", "lag 2"])


@dataclass
class Swapping:
    """An engine whose drafters are only counted, and what it has said of them."""

    engine: CheckedEngine
    exchanges: list[int] = field(default_factory=list)
    said: list[DrafterSwapped] = field(default_factory=list)

    def swap(self, window: int = 0, max_loss: float = 0.1, name: str = "other") -> DrafterSwap:
        swap = DrafterSwap(wanted(window, max_loss, name), self.exchange)
        self.engine.core.swap_drafter(swap)
        return swap

    def exchange(self) -> str:
        core = self.engine.core
        assert not core._in_flight, "a step is in flight"
        assert core._drafting is None, "a step has not drafted"
        self.exchanges.append(core._num_steps)
        return f"drafter {len(self.exchanges) % 2}"

    def step(self) -> list[str]:
        """A step, and the outcomes that it reported."""
        outputs = self.engine.core.step()
        self.engine.take(outputs.deltas)
        self.engine.failed += outputs.failed
        check_core(self.engine.core)
        self.said += outputs.drafter_swaps
        return [each.outcome for each in outputs.drafter_swaps]

    def run(self) -> list[str]:
        """Run to the end; all outcomes on the way."""
        found = []
        while self.engine.core.has_unfinished():
            found += self.step()
        return found


def accepted(num_blocks: int, num_accepted: float, length: int = 0, num_verified: int = 12) -> Acceptance:
    """Blocks behind that many tokens of an answer, of each of which about as many tokens were accepted."""
    found = Acceptance()
    for number in range(num_blocks):
        count = math.floor((number + 1) * num_accepted) - math.floor(number * num_accepted)
        found.note(length, num_verified, count)
    return found


def wanted(window: int = 1000, max_loss: float = 0.1, name: str = "a") -> SwapDrafter:
    return SwapDrafter(swap_id=name, draft_model=name, window=window, max_loss=max_loss)


@MODES
def test_a_drafter_is_exchanged_between_steps_and_no_text_changes(lag: int | None) -> None:
    swapping = Swapping(CheckedEngine(make_config(), lag))
    swapping.engine.add(*crowd())
    for _ in range(4):
        swapping.step()
    swapping.swap()
    assert swapping.run() == ["swapped"]
    assert len(swapping.exchanges) == 1
    swapping.engine.finish()


def test_an_idle_engine_exchanges_at_its_next_step() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    assert not swapping.engine.core.has_unfinished()
    swapping.swap()
    assert swapping.engine.core.has_unfinished()
    assert swapping.step() == ["swapped"]
    assert not swapping.engine.core.has_unfinished()


@pytest.mark.parametrize("error", [ValueError("another shape"), SwapEndsEngine("rank 1 has ended")])
def test_an_exchange_that_fails_is_refused_unless_no_step_can_follow(error: Exception) -> None:
    def exchange() -> str:
        raise error

    swapping = Swapping(CheckedEngine(make_config()))
    swapping.engine.core.swap_drafter(DrafterSwap(wanted(), exchange))
    if isinstance(error, SwapEndsEngine):
        with pytest.raises(SwapEndsEngine, match="rank 1 has ended"):
            swapping.step()
    else:
        assert swapping.step() == ["refused"]


def test_blocks_of_the_drafter_before_are_found_no_more_nor_those_of_requests_that_ran_on() -> None:
    """TOGETHER: a hit has the context KV of the drafter that drafts."""
    swapping = Swapping(CheckedEngine(make_config()))
    engine = swapping.engine
    prompt = list(range(20, 40))
    engine.add(make_request("before", prompt, max_tokens=30))
    for _ in range(3):
        swapping.step()
    swapping.swap()
    swapping.run()
    engine.add(make_request("after", prompt, max_tokens=30))
    swapping.run()
    engine.add(make_request("again", prompt, max_tokens=30))
    swapping.run()
    stats = {name: engine.outputs[name].stats for name in ("after", "again")}
    assert {name: each.num_cached_tokens for name, each in stats.items() if each} == {"after": 0, "again": 16}
    engine.finish()


def test_a_block_that_two_drafters_wrote_is_not_found() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    engine = swapping.engine
    engine.add(make_request("before", [5, 6], max_tokens=30))
    swapping.step()  # half of its first block
    swapping.swap()
    swapping.run()
    text = [5, 6, *engine.outputs["before"].token_ids]
    engine.add(make_request("after", text, max_tokens=2))
    swapping.run()
    stats = engine.outputs["after"].stats
    assert stats is not None
    assert stats.num_cached_tokens == 0


def test_requests_that_ran_on_are_not_counted_for_the_new_drafter() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    engine = swapping.engine
    engine.add(make_request("before", [1, 2, 3, 4, 5], max_tokens=30))
    for _ in range(3):
        swapping.step()
    swap = swapping.swap(window=10_000)
    swapping.run()
    assert swap.now.total == 0
    engine.add(make_request("after", [1, 2, 3, 4, 5], max_tokens=30))
    swapping.run()
    stats = engine.outputs["after"].stats
    assert stats is not None
    counted = stats.spec_decoding
    by_position = [0] * 3
    for (_, position), (_, num_accepted) in swap.now.by_position().items():
        by_position[position] += num_accepted
    assert (swap.now.total, by_position) == (counted.num_drafts, counted.num_accepted_tokens_per_pos)
    before = engine.outputs["before"].stats
    assert before is not None
    assert 0 < swap.before.total < before.spec_decoding.num_drafts


@MODES
@pytest.mark.parametrize(("of_before", "outcome"), [(3, "reverted"), (0, "kept")])
def test_a_drafter_stays_only_if_its_acceptance_does(lag: int | None, of_before: int, outcome: str) -> None:
    swapping = Swapping(CheckedEngine(make_config(), lag))
    swap = swapping.swap(window=12, name="new")
    assert swapping.step() == ["swapped"]
    before = swap.before = Acceptance()
    for length in (0, 1, 2, 4, 8, 16):
        for _ in range(MIN_BLOCKS):
            before.note(length, 3, of_before)
    swapping.engine.add(*crowd())
    assert swapping.run() == [outcome]
    assert len(swapping.exchanges) == (2 if outcome == "reverted" else 1)
    assert swap.exchange is None, "the other drafter's memory is kept"
    words = "of the drafter before it would be" if of_before else "too few blocks"
    assert words in swapping.said[-1].message
    swapping.engine.finish()
    # What is counted from now on is that of the drafter that drafts.
    assert swapping.engine.core._acceptance is (before if outcome == "reverted" else swap.now)
    swapping.swap(name="third")
    assert swapping.run() == ["swapped"]


def test_one_is_compared_at_a_time() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    swapping.swap(window=5)
    with pytest.raises(RequestError, match="still compared"):
        swapping.swap()
    swapping.step()
    with pytest.raises(RequestError, match="still compared"):
        swapping.swap()
    swapping.engine.add(*crowd())
    assert swapping.run() == ["kept"]
    swapping.swap()


@MODES
def test_a_step_that_fails_while_it_is_compared_takes_it_out_before_any_request_is_blamed(lag: int | None) -> None:
    swapping = Swapping(CheckedEngine(make_config(), lag))
    engine = swapping.engine
    engine.add(*crowd())
    for _ in range(3):
        swapping.step()
    swapping.swap(window=10_000)
    # Each step with drafts fails for as long as the new drafter is there.
    engine.worker.fails = lambda plan: len(swapping.exchanges) == 1 and any(row.num_next_draft for row in plan.rows)
    assert swapping.run() == ["swapped", "reverted"]
    assert not engine.failed
    assert "a step failed" in swapping.said[-1].message
    engine.finish()


@MODES
def test_a_worker_is_emptied_before_a_failed_step_takes_the_drafter_out(
    lag: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold a step whose results could not be taken in, which has not drafted."""
    swapping = Swapping(CheckedEngine(make_config(), lag))
    engine, done = swapping.engine, ["exchange"]
    engine.add(*crowd())
    for _ in range(3):
        swapping.step()
    swapping.swap(window=10_000)
    swapping.step()
    reset, exchange = engine.worker.reset, swapping.exchange
    monkeypatch.setattr(engine.worker, "reset", lambda: (done.append("reset"), reset()))
    assert engine.core._swap is not None
    engine.core._swap.exchange = lambda: (done.append("exchange"), exchange())[1]
    failing = iter([True])
    engine.worker.fails_to_collect = lambda: next(failing, False)
    swapping.run()
    assert swapping.said[-1].outcome == "reverted"
    assert done[:3] == ["exchange", "reset", "exchange"]
    assert not engine.failed
    engine.finish()


def test_a_step_that_fails_as_the_drafter_is_due_to_go_takes_it_out_once() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    engine = swapping.engine
    swap = swapping.swap(window=10)
    swapping.step()
    swap.before = Acceptance()
    for length in (0, 1, 2, 4, 8, 16):
        for _ in range(MIN_BLOCKS):
            swap.before.note(length, 3, 3)
    engine.add(*crowd())
    engine.worker.fails_to_draft = lambda plan: engine.core._due_swap is not None and len(swapping.exchanges) == 1
    assert swapping.run() == ["reverted"]
    assert len(swapping.exchanges) == 2
    assert not engine.failed
    engine.finish()


def test_a_drafter_that_cannot_be_put_in_leaves_the_one_before() -> None:
    swapping = Swapping(CheckedEngine(make_config()))
    engine = swapping.engine
    engine.add(*crowd())
    swapping.step()

    def fails() -> None:
        raise MemoryError("no memory for a piece")

    engine.core.swap_drafter(DrafterSwap(wanted(), fails))
    assert swapping.run() == ["refused"]
    assert "no memory for a piece" in swapping.said[-1].message
    engine.finish()
    swapping.swap()
    assert swapping.run() == ["swapped"]


@pytest.mark.parametrize(
    ("num_blocks", "window", "pays", "due"),
    [(99, 100, True, False), (100, 100, True, True), (100, 1000, True, False), (100, 1000, False, True)],
)
def test_drafts_that_no_longer_pay_are_not_waited_for(num_blocks: int, window: int, pays: bool, due: bool) -> None:
    swap = DrafterSwap(wanted(window), lambda: None, now=accepted(num_blocks, 0))
    assert swap.is_due(drafting_pays=pays) == due
    assert not DrafterSwap(wanted(window), None, now=swap.now).is_due(drafting_pays=pays)
    assert not DrafterSwap(wanted(0), lambda: None, now=swap.now).is_due(drafting_pays=pays)


@pytest.mark.parametrize(
    ("num_blocks", "now", "loses"), [(10_000, 0.92, False), (10_000, 0.88, True), (30, 0.85, False), (30, 0.5, True)]
)
def test_a_tenth_of_the_accepted_drafts_may_be_lost(num_blocks: int, now: float, loses: bool) -> None:
    """Of 1, so 0.9 are enough; of few blocks it is not sure that they are fewer."""
    before = accepted(MIN_BLOCKS, 1, num_verified=1)
    swap = DrafterSwap(wanted(), lambda: None, before=before, now=accepted(num_blocks, now, num_verified=1))
    assert swap.loses() == loses
    swap.before = accepted(MIN_BLOCKS - 1, 1, num_verified=1)
    assert not swap.loses(), "too little is known of the one before"
    assert "too few blocks" in swap.comparison()


def test_blocks_are_compared_with_those_as_far_into_their_answers() -> None:
    before = accepted(500, 6, length=200)
    for _ in range(500):
        before.note(1, 12, 1)
    swap = DrafterSwap(wanted(), lambda: None, before=before, now=accepted(500, 1, length=1))
    assert not swap.loses()
    assert swap.comparison() == "500 drafts of 500 blocks were accepted; of the drafter before it would be 500"
    swap.now = accepted(500, 1, length=200)
    assert swap.loses()
    swap.now = accepted(500, 1, length=5000)
    assert not swap.loses(), "of such answers nothing is known"


def test_fewer_drafts_in_a_block_are_no_loss() -> None:
    """Under load less is drafted, and of two drafts no more than two are accepted."""
    swap = DrafterSwap(wanted(), lambda: None, before=accepted(500, 6), now=accepted(500, 2, num_verified=2))
    assert not swap.loses()
    swap.now = accepted(500, 1, num_verified=2)
    assert swap.loses()


def test_what_was_tried_at_each_position_follows_from_the_blocks() -> None:
    found = Acceptance()
    found.note(0, 3, 0)
    found.note(0, 3, 3)
    found.note(9, 2, 1)
    assert found.total == 3
    assert found.by_position() == {(0, 0): (2, 1), (0, 1): (1, 1), (0, 2): (1, 1), (4, 0): (1, 1), (4, 1): (1, 0)}
