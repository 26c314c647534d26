"""No request waits for ever: under loads made to thrash, the oldest moves in every step and all finish.

`CheckedEngine` asserts after every step that the oldest running request computed more than before. What remains to show
is that loads which preempt all the time end, in order, within a bound.
"""

from __future__ import annotations

import pytest

from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import make_config, make_request
from tests.core.toy_model import NONE_ACCEPTED


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prefill", [None, 1])
def test_a_pool_for_one_request_serves_many_that_all_want_it_whole(caching: bool, prefill: int | None) -> None:
    # Each needs the whole pool at its end, and eight are admitted as soon as their prompts fit.
    config = make_config(
        num_blocks=12,
        max_model_len=48,
        drafter_max_len=48,
        enable_prefix_caching=caching,
        max_prefill_tokens_per_step=prefill,
    )
    engine = CheckedEngine(config)
    engine.add(*[make_request(f"r{i}", [i, 2, 3], max_tokens=45, seed=NONE_ACCEPTED) for i in range(12)])
    engine.finish()
    assert engine.core.stats().num_preemptions > 10
    # No draft is accepted: alone, a request takes a step for each token of its 48.
    assert engine.worker.num_steps <= 12 * (48 + 3)


def test_a_stream_of_short_requests_does_not_hold_up_a_long_one() -> None:
    engine = CheckedEngine(make_config(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=16))
    engine.add(make_request("long", [7] * 90, max_tokens=20, seed=NONE_ACCEPTED))
    num_steps = 0
    while engine.outputs["long"].finish_reason is None:
        engine.add(make_request(f"short {num_steps}", [num_steps % 50, 1], max_tokens=2))
        engine.step()
        num_steps += 1
    # Those behind it take at most half of what a step has for prompts, so it takes at most twice as long.
    assert num_steps <= 2 * 6 + 20
    engine.finish()


def test_a_long_prompt_at_the_head_of_the_queue_is_not_overtaken_for_ever() -> None:
    # Its blocks are free only when nearly all have gone; the shorter ones behind it would fit all the time.
    engine = CheckedEngine(make_config(num_blocks=30, max_num_seqs=8))
    engine.add(*[make_request(f"early {i}", [i, 1, 2], max_tokens=16, seed=NONE_ACCEPTED) for i in range(6)])
    engine.step()
    engine.add(make_request("long", [9] * 100, max_tokens=10, seed=NONE_ACCEPTED))
    engine.add(*[make_request(f"late {i}", [i, 5], max_tokens=16, seed=NONE_ACCEPTED) for i in range(20)])
    num_steps = 0
    while engine.outputs["long"].finish_reason is None:
        engine.step()
        num_steps += 1
        if not engine.outputs["long"].token_ids:
            assert not any(engine.outputs[f"late {index}"].token_ids for index in range(20))
    assert num_steps <= 2 * 16
    engine.finish()


def test_preempted_requests_come_back_in_the_order_in_which_they_arrived() -> None:
    engine = CheckedEngine(make_config(num_blocks=14, enable_prefix_caching=False))
    engine.add(*[make_request(f"r{i}", [i] * 5, max_tokens=30, seed=NONE_ACCEPTED) for i in range(5)])
    ended: list[str] = []
    while engine.core.has_unfinished():
        engine.step()
        ended += [name for name, out in engine.outputs.items() if out.finish_reason and name not in ended]
    assert ended == [f"r{index}" for index in range(5)]
    assert engine.core.stats().num_preemptions > 0
    engine.finish()


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    engine = CheckedEngine(make_config())
    for index in range(1000):
        engine.add(make_request(f"r{index}", [1], max_tokens=1, deadline_s=1e6))
        engine.step()
    assert len(engine.core._deadlines.heap) <= 100
    engine.finish()
