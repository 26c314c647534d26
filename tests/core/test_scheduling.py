"""What a step is made of: lookahead, the drafter's window, chunks, budget, prefix hits, preemption and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.core.toy_engine import PROMPT, Engine, Output, crowd, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED, expected_output, greedy_continuation


@pytest.mark.parametrize(
    ("config", "sampling", "prompt_len", "num_steps", "num_blocks"),
    [
        # k = 3: the prompt, then the anchor's query and three mask queries.
        ({}, {}, 8, 1, 3),
        ({}, {}, 9, 1, 4),
        # A lookahead of k would take 12 positions here.
        ({"block_size": 1}, {}, 9, 1, 9 + 1 + 3),
        ({"block_size": 1, "lookahead_base": 0}, {}, 9, 1, 9 + 3),
        ({"block_size": 1, "lookahead_base": None}, {}, 9, 1, 9),
        ({"block_size": 1, "lookahead_base": None}, {}, 9, 2, 9 + 1 + 3),
        ({"block_size": 1}, {"num_speculative_tokens": 0}, 9, 1, 9),
        ({"block_size": 1, "max_num_batched_tokens": 5}, {}, 9, 1, 5 + 4),
        ({"block_size": 1}, {}, 9, 2, 9 + 1 + 3 + 4),
    ],
    ids=[
        "two blocks",
        "a third block",
        "anchor",
        "autoregressive",
        "no queries",
        "drafts",
        "no drafter",
        "chunk",
        "past verified drafts",
    ],
)
def test_a_step_reserves_its_tokens_and_the_lookahead(
    config: dict[str, Any], sampling: dict[str, int], prompt_len: int, num_steps: int, num_blocks: int
) -> None:
    engine = Engine(make_config(**config))
    engine.add(make_request("a", [1] * prompt_len, **sampling))
    engine.steps(num_steps)
    assert sum(len(row.new_block_ids) for row in engine.rows_of("a")) == num_blocks
    assert len(engine.scheduler.running["a"].block_ids) == num_blocks


@pytest.mark.parametrize(
    ("drafter_max_len", "max_model_len", "prompt_len", "k"),
    [
        # After the prefill of 9 the anchor is at position 9 and three masks follow it: 13 positions.
        (13, 100, 9, 3),
        (12, 100, 9, 0),
        # The numbers of vLLM's pull request 42971: 96 computed positions, the anchor and three masks.
        (100, 200, 96, 3),
        (100, 200, 97, 0),
        # Verified positions stay within max_model_len.
        (100, 13, 9, 3),
        (100, 12, 9, 0),
    ],
)
def test_drafter_window_reserves_the_anchor_slot(
    drafter_max_len: int, max_model_len: int, prompt_len: int, k: int
) -> None:
    engine = Engine(make_config(drafter_max_len=drafter_max_len, max_model_len=max_model_len))
    engine.add(make_request("a", [1] * prompt_len))
    engine.step()
    assert engine.rows_of("a")[0].num_next_draft == k


def test_a_decode_row_applies_the_window_as_if_all_drafts_were_accepted() -> None:
    engine = Engine(make_config(drafter_max_len=17))
    engine.run(make_request("a", [1] * 9, max_tokens=40, seed=ALL_ACCEPTED))
    prefill, first, second, *_ = engine.rows_of("a")
    assert prefill.num_next_draft == 3
    # 9 computed, an anchor, three drafts, the anchor after them and three masks: 17 just fits.
    assert (first.num_computed, first.num_draft, first.num_next_draft) == (9, 3, 3)
    assert (second.num_draft, second.num_next_draft) == (3, 0)


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    prompt = list(range(1, 31))
    (output,) = engine.run(make_request("a", prompt))
    chunks = [(row.num_new, row.sample, row.num_next_draft) for row in engine.rows_of("a")[:4]]
    assert chunks == [(8, False, 0), (8, False, 0), (8, False, 0), (6, True, 3)]
    assert output.token_ids == greedy_continuation(prompt, 16)


def test_decode_rows_come_before_prefill_chunks() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    engine.add(make_request("first", PROMPT[:4]))
    engine.step()
    engine.add(make_request("long", list(range(1, 31))))
    engine.step()
    rows = [(row.request_id, row.num_new, row.num_draft) for row in engine.last_rows]
    assert rows == [("first", 1, 3), ("long", 4, 0)]


def test_drafts_are_never_trimmed_by_the_budget() -> None:
    engine = Engine(make_config(max_num_batched_tokens=9))
    engine.run(*[make_request(name, PROMPT[:2], temperature=1.0, seed=2) for name in "abc"])
    assert {row.num_draft for plan in engine.worker.plans for row in plan.rows} == {0, 3}


@pytest.mark.parametrize(("limit", "most"), [({"max_num_seqs": 2}, 2), ({"max_num_batched_tokens": 4 + 4 + 2}, 3)])
def test_no_more_requests_run_than_fit_and_can_decode_in_one_step(limit: dict[str, int], most: int) -> None:
    engine = Engine(make_config(**limit))
    k = {"c": 1}
    engine.run(
        *[make_request(name, PROMPT, max_tokens=12, seed=0, num_speculative_tokens=k.get(name)) for name in "abcde"]
    )
    assert max(len(plan.rows) for plan in engine.worker.plans) == most


def test_every_running_request_has_a_row_in_every_step() -> None:
    engine = Engine(make_config(max_num_batched_tokens=13, num_blocks=40))
    engine.add(*[make_request(f"r{i}", [i, *range(30)], max_tokens=20, seed=i) for i in range(9)])
    while engine.core.has_unfinished():
        before = set(engine.running)
        engine.step()
        assert before & set(engine.running) <= {row.request_id for row in engine.last_rows}


@pytest.mark.parametrize(
    ("num_streams", "config", "chunks"),
    [
        (3, {"max_prefill_tokens_per_step": 20}, [20, 20, 10]),
        (7, {"min_prefill_tokens_per_step": 4}, [14, 14, 14, 8]),
        (2, {"min_prefill_tokens_per_step": 16}, [16, 16, 16, 2]),
        (0, {"max_prefill_tokens_per_step": 5}, [50]),
    ],
    ids=["the setting", "half of what decodes", "the floor", "no stream to hold up"],
)
def test_a_prompt_of_50_gets_its_share_of_a_step_beside_streams(
    num_streams: int, config: dict[str, int], chunks: list[int]
) -> None:
    engine = Engine(make_config(num_blocks=200, **config))
    engine.add(*[make_request(f"s{i}", [i], max_tokens=100, seed=NONE_ACCEPTED) for i in range(num_streams)])
    engine.step()
    engine.add(make_request("long", [1] * 50, max_tokens=1))
    engine.run_until_finished("long")
    assert [row.num_new for row in engine.rows_of("long")] == chunks


def test_the_automatic_share_grows_when_more_wait_than_decode() -> None:
    engine = Engine(make_config(num_blocks=200, min_prefill_tokens_per_step=4))
    engine.add(make_request("stream", [1], max_tokens=100, seed=0))
    engine.step()
    engine.add(*[make_request(f"p{i}", [i] * 9, max_tokens=1) for i in range(5)])
    engine.step()
    stream, *prompts = engine.last_rows
    assert stream.num_new + stream.num_draft == 4
    assert sum(row.num_new for row in prompts) == 4 * 5


def test_of_many_prompt_tokens_each_step_takes_a_part() -> None:
    """An eighth of what is left of the prompts that run and wait, where their number alone would give them less."""
    engine = Engine(make_config(num_blocks=400, max_model_len=500, min_prefill_tokens_per_step=4))
    engine.add(make_request("stream", [1], max_tokens=400, seed=NONE_ACCEPTED))
    engine.step()
    engine.add(*[make_request(f"p{i}", [i] * 400, max_tokens=1) for i in range(3)])
    left, taken = 1200, []
    while left > 8 * 3 * 4:
        engine.step()
        taken.append(sum(row.num_new for row in engine.last_rows[1:]))
        assert taken[-1] == left // 8
        left -= taken[-1]
    assert len(taken) > 15
    engine.add(make_request("later", [7] * 480, max_tokens=1))
    engine.step()
    assert sum(row.num_new for row in engine.last_rows[1:]) == (left + 480) // 8


def test_prompts_share_what_a_step_has_for_them_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_prefill_tokens_per_step=10, num_blocks=100))
    engine.add(make_request("stream", [1], max_tokens=60, seed=0))
    engine.step()
    engine.add(*[make_request(f"p{i}", [i] * 6, max_tokens=1) for i in range(3)])
    for shares in ([("p0", 6), ("p1", 4)], [("p1", 2), ("p2", 6)]):
        engine.step()
        assert [(row.request_id, row.num_new) for row in engine.last_rows[1:]] == shares


CACHED = list(range(1, 41))


@pytest.mark.parametrize(
    ("behind", "steps"),
    [
        ({"a": [2] * 4, "b": [3] * 5}, ["long 11, a 4, b 5", "long 20", "long 9"]),
        ({"hit": [*CACHED, 2, 3]}, ["long 18, hit 2"]),
        ({str(i): [i] * 4 for i in range(4)}, ["long 12, 0 4, 1 4", "long 12, 2 4, 3 4"]),
        ({"other": [2] * 30, "short": [3]}, ["long 20", "long 20"]),
        ({"early": [2] * 2}, ["long 18, early 2", "long 20", "long 2"]),
    ],
    ids=[
        "short ones run alongside",
        "cached ones are short",
        "half of the step",
        "a second long one waits",
        "the rest",
    ],
)
def test_behind_a_prompt_of_several_steps(behind: dict[str, Sequence[int]], steps: list[str]) -> None:
    """The prefill rows of each step, from the first in which a prompt of 60 tokens runs and others wait behind it."""
    engine = Engine(make_config(max_prefill_tokens_per_step=20, num_blocks=200))
    engine.run(make_request("cached", CACHED, max_tokens=1))
    engine.add(make_request("stream", [1], max_tokens=100, seed=0))
    engine.step()
    engine.add(make_request("long", [9] * 60, max_tokens=1))
    engine.step()
    engine.add(*[make_request(name, prompt, max_tokens=1) for name, prompt in behind.items()])
    for expected in steps:
        engine.step()
        assert ", ".join(f"{row.request_id} {row.num_new}" for row in engine.last_rows[1:]) == expected


def test_requests_are_admitted_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_num_seqs=2, num_blocks=20))
    engine.run(make_request("big", [1] * 40), make_request("bigger", [2] * 50), make_request("small", [3]))
    started = dict.fromkeys(new.request_id for plan in engine.worker.plans for new in plan.new_requests)
    assert list(started) == ["big", "bigger", "small"], "though blocks for the small one were free from the start"


def _cached(output: Output) -> int:
    return output.stats.num_cached_tokens


def test_cold_prompts_do_not_evict_a_prefix_that_was_shared() -> None:
    engine = Engine(make_config(num_blocks=40))
    shared = list(range(1, 17))
    for index in range(2):
        engine.run(make_request(f"tenant {index}", [*shared, 40 + index], max_tokens=2))
    for index in range(30):
        engine.run(make_request(f"cold {index}", [index, *range(20, 36)], max_tokens=2))
    (again,) = engine.run(make_request("again", [*shared, 45], max_tokens=2))
    assert _cached(again) == 16
    assert engine.pool.num_evicted > 40


@pytest.mark.parametrize(
    ("prompt", "later", "num_cached"),
    [
        (range(1, 10), [*range(1, 9), 40, 41], 8),
        # One token is left to compute.
        (range(1, 9), range(1, 9), 4),
    ],
)
def test_a_hit_ends_with_a_full_block(prompt: Sequence[int], later: Sequence[int], num_cached: int) -> None:
    engine = Engine(make_config())
    engine.run(make_request("first", list(prompt), max_tokens=1))
    (output,) = engine.run(make_request("later", list(later), max_tokens=8))
    assert _cached(output) == num_cached
    assert output.token_ids == greedy_continuation(list(later), 8)


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    engine = Engine(make_config(enable_prefix_caching=False))
    engine.run(make_request("a", PROMPT))
    (again,) = engine.run(make_request("b", PROMPT))
    assert _cached(again) == 0
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = Engine(make_config())
    (first,) = engine.run(make_request("a", PROMPT, max_tokens=12))
    (second,) = engine.run(make_request("b", [*PROMPT, *first.token_ids, 1, 2, 3]))
    assert _cached(second) == 20, "of 21 tokens, five full blocks"
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9 + 24, 20)


def test_accepted_tokens_past_the_end_of_a_request_are_not_published() -> None:
    engine = Engine(make_config(block_size=1))
    expected = greedy_continuation(PROMPT, 5)
    # All three drafts are accepted; the request ends with the first of them.
    (first,) = engine.run(make_request("a", PROMPT, max_tokens=2, seed=ALL_ACCEPTED))
    assert first.token_ids == expected[:2]
    assert sum(engine.pool.is_cached(block_id) for block_id in range(engine.pool.num_blocks)) == 11
    (second,) = engine.run(make_request("b", [*PROMPT, *expected]))
    assert _cached(second) == 11, "prompt and the two tokens that were kept"


def test_different_salts_never_share_a_block() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT, cache_salt="a"))
    other, same = engine.run(make_request("b", PROMPT, cache_salt="b"), make_request("again", PROMPT, cache_salt="a"))
    assert (_cached(other), _cached(same)) == (0, 8)
    assert other.token_ids == same.token_ids


def test_two_equal_prompts_in_one_step_keep_their_own_blocks() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT), make_request("b", PROMPT))
    engine.step()
    a, b = engine.scheduler.running.values()
    assert set(a.block_ids).isdisjoint(b.block_ids)
    assert [engine.pool.is_cached(block_id) for block_id in a.block_ids[:3]] == [True, True, False]
    assert not any(engine.pool.is_cached(block_id) for block_id in b.block_ids)


def test_requests_that_run_share_the_blocks_of_a_hit() -> None:
    engine = Engine(make_config())
    for name in "ab":
        engine.add(make_request(name, PROMPT))
        engine.step()
    a, b = engine.scheduler.running.values()
    assert a.block_ids[:2] == b.block_ids[:2]
    assert set(a.block_ids[2:]).isdisjoint(b.block_ids[2:])


def test_the_latest_arrival_is_preempted_and_the_oldest_never() -> None:
    engine = Engine(make_config(num_blocks=20, enable_prefix_caching=False))
    preemptions = [output.stats.num_preemptions for output in engine.run(*crowd())]
    assert preemptions[0] == 0
    assert engine.core.stats().num_preemptions == sum(preemptions) > 0


def test_a_preempted_request_waits_until_its_decode_row_fits_too() -> None:
    engine = Engine(make_config(num_blocks=40, block_size=1, enable_prefix_caching=False))
    old = make_request("old", PROMPT, max_tokens=24, num_speculative_tokens=0)
    _, young = engine.run(old, make_request("young", PROMPT, max_tokens=12, seed=NONE_ACCEPTED))
    assert young.stats.num_preemptions == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_changes_no_output(temperature: float, caching: bool) -> None:
    config = make_config(num_blocks=20, enable_prefix_caching=caching, max_num_batched_tokens=17)
    engine = Engine(config)
    requests = crowd(temperature=temperature)
    outputs = engine.run(*requests)
    assert engine.core.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs] == [expected_output(request, config)[0] for request in requests]


def test_a_resumed_request_computes_up_to_its_anchor_and_drafts_from_it() -> None:
    engine = Engine(make_config(num_blocks=20, enable_prefix_caching=False))
    engine.run(*crowd(seed=NONE_ACCEPTED))
    resumed = [row for plan in engine.worker.plans for row in plan.rows if not row.sample and row.num_next_draft]
    assert resumed
    for row in resumed:
        rows = engine.rows_of(row.request_id)
        after = rows[rows.index(row) + 1]
        if after.num_computed:  # else it was preempted once more before it could go on
            assert (after.num_computed, after.num_new) == (row.num_computed + row.num_new, 1)
            assert after.num_draft == row.num_next_draft


def _verified_blocks(engine: Engine, request_id: str) -> list[tuple[int, int]]:
    return [(row.num_computed, row.num_draft) for row in engine.rows_of(request_id) if row.sample and row.num_draft]


def test_draft_blocks_start_where_they_would_have_without_preemption() -> None:
    # Near the drafter's limit the drafts pending may come from a decision that the present length would not repeat.
    for drafter_max_len in range(20, 44):
        limits = {"drafter_max_len": drafter_max_len, "enable_prefix_caching": False}
        crowded = Engine(make_config(num_blocks=20, **limits))
        requests = crowd(temperature=1.0, seed=2)
        crowded.run(*requests)
        for request in requests:
            alone = Engine(make_config(**limits))
            alone.run(request)
            assert _verified_blocks(crowded, request.request_id) == _verified_blocks(alone, request.request_id)


def test_blocks_that_a_preempted_request_finds_again_are_no_hit_and_not_protected() -> None:
    engine = Engine(make_config(num_blocks=22))
    outputs = engine.run(*crowd())
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens == stats.prefix_cache_queries == 5 * 10
    assert stats.prefix_cache_hits == sum(_cached(output) for output in outputs) == 0
    assert not any(engine.pool._reused[block_id] for block_id in range(22))


def test_a_hit_on_all_but_the_anchor_still_leaves_a_row_to_draft_from() -> None:
    engine = Engine(make_config(block_size=1, num_blocks=60))
    engine.add(make_request("old", [40], max_tokens=40, seed=ALL_ACCEPTED))
    engine.add(make_request("young", PROMPT, max_tokens=20, seed=ALL_ACCEPTED))
    engine.steps(2)
    request = engine.scheduler.running["young"]
    computed = request.num_computed
    engine.scheduler._preempt(request)
    engine.step()
    resumed = engine.rows_of("young")[-1]
    assert (resumed.num_computed, resumed.num_new, resumed.sample) == (computed - 1, 1, False)
    assert resumed.num_next_draft == 3
    engine.run()
    assert engine.outputs["young"].token_ids == greedy_continuation(PROMPT, 20)


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_names_the_blocks_from_the_first_uncomputed_position_on(guard: bool) -> None:
    engine = Engine(make_config(kv_write_guard=guard))
    engine.run(make_request("a", PROMPT))
    engine.add(make_request("b", PROMPT))
    engine.step()
    plan = engine.worker.plans[-1]
    if guard:
        assert plan.writable_block_ids == {"b": frozenset(plan.rows[0].new_block_ids[2:])}
    else:
        assert {plan.writable_block_ids for plan in engine.worker.plans} == {None}
