"""Nobody waits for ever: under loads made to thrash, the oldest request moves in every step and everybody finishes.

`CheckedEngine` asserts after every step that the oldest running request computed more than before. What remains to show
is that loads which preempt all the time end, in order, within a bound.
"""

from __future__ import annotations

import pytest
from checked_engine import CheckedEngine
from toy_core import make_config, make_request

from dflash_backend.messages import GenerationRequest


def _steps(engine: CheckedEngine, requests: list[GenerationRequest]) -> int:
    for request in requests:
        engine.add(request)
    engine.finish()
    return engine.worker.num_steps


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
    requests = [make_request(f"r{i}", [i, 2, 3], max_tokens=45, seed=0) for i in range(12)]
    num_steps = _steps(engine, requests)
    assert engine.core.stats().num_preemptions > 10
    # No draft ever stands with this seed: alone, a request takes a step for each token of its 48.
    assert num_steps <= 12 * (48 + 3)


def test_a_stream_of_short_requests_does_not_hold_up_a_long_one() -> None:
    engine = CheckedEngine(make_config(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=16))
    engine.add(make_request("long", [7] * 90, max_tokens=20, seed=0))
    num_steps = 0
    while engine.outputs["long"].finish_reason is None:
        engine.add(make_request(f"short {num_steps}", [num_steps % 50, 1], max_tokens=2))
        engine.step()
        num_steps += 1
    # Those behind it take at most half of what a step has for prompts, so it takes at most twice as long.
    assert num_steps <= 2 * 6 + 20
    engine.finish()


def test_a_long_prompt_at_the_head_of_the_queue_is_not_overtaken_for_ever() -> None:
    # Its blocks are free only when nearly everybody has gone; the shorter ones behind it would fit all the time.
    engine = CheckedEngine(make_config(num_blocks=30, max_num_seqs=8))
    for index in range(6):
        engine.add(make_request(f"early {index}", [index, 1, 2], max_tokens=16, seed=0))
    engine.step()
    engine.add(make_request("long", [9] * 100, max_tokens=10, seed=0))
    for index in range(20):
        engine.add(make_request(f"late {index}", [index, 5], max_tokens=16, seed=0))
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
    for index in range(5):
        engine.add(make_request(f"r{index}", [index] * 5, max_tokens=30, seed=0))
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
    assert len(engine.core._deadlines._heap) <= 100
    engine.finish()
