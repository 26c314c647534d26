"""What a step is made of: lookahead, the drafter's window, chunks, budget, prefix hits, preemption and order."""

from __future__ import annotations

from collections.abc import Sequence

from toy_core import Engine, Output, greedy_continuation, make_config, make_request, run_alone

from dflash_backend.messages import GenerationRequest

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def _blocks_after_first_step(engine: Engine, prompt: list[int], **sampling: object) -> int:
    engine.add(make_request("a", prompt, **sampling))
    engine.step()
    return len(engine.core.scheduler.running["a"].block_ids)


def test_the_first_prefill_reserves_the_anchor_and_k_masks() -> None:
    # k = 3: the prompt, then the anchor's query and three mask queries.
    assert _blocks_after_first_step(Engine(make_config(block_size=4)), [1] * 8) == 3
    assert _blocks_after_first_step(Engine(make_config(block_size=4)), [1] * 9) == 4
    # A lookahead of k would have been content with 12 positions here.
    assert _blocks_after_first_step(Engine(make_config(block_size=1)), [1] * 9) == 13


def test_an_autoregressive_drafter_reserves_k_and_no_drafter_nothing() -> None:
    assert _blocks_after_first_step(Engine(make_config(block_size=1, lookahead_base=0)), [1] * 9) == 12
    assert _blocks_after_first_step(Engine(make_config(block_size=1)), [1] * 9, num_speculative_tokens=0) == 9


def test_a_chunk_of_a_prefill_reserves_lookahead_too() -> None:
    engine = Engine(make_config(block_size=1, max_num_batched_tokens=5))
    assert _blocks_after_first_step(engine, [1] * 9) == 5 + 4


def test_decode_reserves_past_the_drafts_it_verifies() -> None:
    engine = Engine(make_config(block_size=1))
    engine.add(make_request("a", [1] * 9))
    engine.step()
    engine.step()
    row = engine.rows_of("a")[1]
    reserved = sum(len(r.new_block_ids) for r in engine.rows_of("a"))
    assert reserved == row.num_computed + 1 + 3 + 4


def _next_drafts(drafter_max_len: int, max_model_len: int, prompt_len: int) -> int:
    engine = Engine(make_config(drafter_max_len=drafter_max_len, max_model_len=max_model_len))
    engine.add(make_request("a", [1] * prompt_len))
    engine.step()
    return engine.rows_of("a")[0].num_next_draft


def test_drafter_window_reserves_the_anchor_slot() -> None:
    # After the prefill of 9 the anchor is at position 9 and three masks follow it: 13 positions.
    assert _next_drafts(drafter_max_len=13, max_model_len=100, prompt_len=9) == 3
    assert _next_drafts(drafter_max_len=12, max_model_len=100, prompt_len=9) == 0


def test_with_three_drafts_and_a_limit_of_100_a_sequence_of_96_still_drafts() -> None:
    """The numbers of vLLM's pull request 42971: 96 computed positions, the anchor and three masks."""
    assert _next_drafts(drafter_max_len=100, max_model_len=200, prompt_len=96) == 3
    assert _next_drafts(drafter_max_len=100, max_model_len=200, prompt_len=97) == 0


def test_verified_positions_stay_within_max_model_len() -> None:
    assert _next_drafts(drafter_max_len=100, max_model_len=13, prompt_len=9) == 3
    assert _next_drafts(drafter_max_len=100, max_model_len=12, prompt_len=9) == 0


def test_a_decode_row_judges_the_window_by_all_drafts_standing() -> None:
    engine = Engine(make_config(drafter_max_len=17))
    engine.run(make_request("a", [1] * 9, max_tokens=40, seed=3))
    prefill, first, second, *_ = engine.rows_of("a")
    assert prefill.num_next_draft == 3
    # 9 computed, an anchor, three drafts, the anchor after them and three masks: 17 just fits.
    assert (first.num_computed, first.num_draft, first.num_next_draft) == (9, 3, 3)
    assert (second.num_draft, second.num_next_draft) == (3, 0)


def test_past_the_window_a_request_goes_on_without_drafts() -> None:
    engine = Engine(make_config(drafter_max_len=20))
    (output,) = engine.run(make_request("a", [1] * 9, max_tokens=40))
    assert output.token_ids == greedy_continuation([1] * 9, 40)
    assert engine.rows_of("a")[-1].num_draft == 0
    assert output.stats is not None
    assert output.stats.spec_decoding.num_drafts > 0


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    prompt = list(range(1, 31))
    (output,) = engine.run(make_request("a", prompt))
    chunks = engine.rows_of("a")[:4]
    assert [row.num_new for row in chunks] == [8, 8, 8, 6]
    assert [row.sample for row in chunks] == [False, False, False, True]
    assert [row.num_next_draft for row in chunks] == [0, 0, 0, 3]
    assert output.token_ids == greedy_continuation(prompt, 16)


def test_decode_rows_come_before_prefill_chunks() -> None:
    engine = Engine(make_config(max_num_batched_tokens=8))
    engine.add(make_request("first", PROMPT[:4]))
    engine.step()
    engine.add(make_request("long", list(range(1, 31))))
    engine.step()
    first, long = engine.worker.plans[-1].rows
    assert (first.request_id, first.num_new + first.num_draft) == ("first", 4)
    assert (long.request_id, long.num_new) == ("long", 4)


def test_drafts_are_never_trimmed_by_the_budget() -> None:
    engine = Engine(make_config(max_num_batched_tokens=9))
    engine.run(*[make_request(name, PROMPT[:2], temperature=1.0, seed=2) for name in "abc"])
    rows = [row for plan in engine.worker.plans for row in plan.rows if row.num_draft]
    assert {row.num_draft for row in rows} == {3}


def test_no_more_requests_run_than_can_decode_in_one_step() -> None:
    engine = Engine(make_config(max_num_batched_tokens=10))
    requests = [make_request(name, PROMPT, max_tokens=12, seed=0) for name in "abcde"]
    requests[2] = make_request("c", PROMPT, max_tokens=12, seed=0, num_speculative_tokens=1)
    engine.run(*requests)
    assert max(len(plan.rows) for plan in engine.worker.plans) == 3, "4 + 4 + 2 tokens"


def test_whoever_runs_has_a_row_in_every_step() -> None:
    engine = Engine(make_config(max_num_batched_tokens=13, num_blocks=40))
    for request in [make_request(f"r{i}", [i, *range(30)], max_tokens=20, seed=i) for i in range(9)]:
        engine.add(request)
    while engine.core.has_unfinished():
        before = set(engine.core.scheduler.running)
        engine.step()
        stayed = before & set(engine.core.scheduler.running)
        assert stayed <= {row.request_id for row in engine.worker.plans[-1].rows}


def _chunks_beside_streams(num_streams: int, prompt_len: int, **changes: object) -> list[int]:
    """How a prompt is cut that arrives while streams decode four tokens a step each."""
    engine = Engine(make_config(num_blocks=200, **changes))
    for index in range(num_streams):
        engine.add(make_request(f"s{index}", [index], max_tokens=100, seed=0))
    engine.step()
    engine.add(make_request("long", [1] * prompt_len, max_tokens=1))
    while "long" in engine.core.scheduler.running or "long" in engine.core.scheduler.waiting:
        engine.step()
    return [row.num_new for row in engine.rows_of("long")]


def test_beside_streams_a_long_prompt_gets_no_more_than_the_setting_allows() -> None:
    assert _chunks_beside_streams(3, 50, max_prefill_tokens_per_step=20) == [20, 20, 10]


def test_the_automatic_share_of_a_prompt_is_half_of_what_decodes_and_has_a_floor() -> None:
    assert _chunks_beside_streams(7, 50, min_prefill_tokens_per_step=4) == [14, 14, 14, 8]
    assert _chunks_beside_streams(2, 50, min_prefill_tokens_per_step=16) == [16, 16, 16, 2]


def test_the_automatic_share_grows_when_more_wait_than_decode() -> None:
    engine = Engine(make_config(num_blocks=200, min_prefill_tokens_per_step=4))
    engine.add(make_request("stream", [1], max_tokens=100, seed=0))
    engine.step()
    for index in range(5):
        engine.add(make_request(f"p{index}", [index] * 9, max_tokens=1))
    engine.step()
    plan = engine.worker.plans[-1]
    assert plan.rows[0].num_new + plan.rows[0].num_draft == 4
    assert sum(row.num_new for row in plan.rows[1:]) == 4 * 5


def test_with_no_stream_to_hold_up_a_prompt_gets_the_whole_step() -> None:
    assert _chunks_beside_streams(0, 50, max_prefill_tokens_per_step=5) == [50]


def test_prompts_share_what_a_step_has_for_them_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_prefill_tokens_per_step=10, num_blocks=100))
    engine.add(make_request("stream", [1], max_tokens=60, seed=0))
    engine.step()
    for index in range(3):
        engine.add(make_request(f"p{index}", [index] * 6, max_tokens=1))
    engine.step()
    assert [(row.request_id, row.num_new) for row in engine.worker.plans[-1].rows[1:]] == [("p0", 6), ("p1", 4)]
    engine.step()
    assert [(row.request_id, row.num_new) for row in engine.worker.plans[-1].rows[1:]] == [("p1", 2), ("p2", 6)]


def _beside_a_long_prompt(*behind: GenerationRequest, cached: Sequence[int] = ()) -> list[list[tuple[str, int]]]:
    """The prefill rows of each step, from the first in which a prompt of 60 tokens runs and others wait behind it."""
    engine = Engine(make_config(max_prefill_tokens_per_step=20, num_blocks=200))
    if cached:
        engine.run(make_request("cached", list(cached), max_tokens=1))
    engine.add(make_request("stream", [1], max_tokens=100, seed=0))
    engine.step()
    engine.add(make_request("long", [9] * 60, max_tokens=1))
    engine.step()
    for request in behind:
        engine.add(request)
    first = len(engine.worker.plans)
    while len(engine.core.scheduler.running) + len(engine.core.scheduler.waiting) > 1:
        engine.step()
    return [
        [(row.request_id, row.num_new) for row in plan.rows if row.request_id != "stream"]
        for plan in engine.worker.plans[first:]
    ]


def test_short_prompts_run_alongside_one_that_takes_several_steps() -> None:
    steps = _beside_a_long_prompt(make_request("a", [2] * 4, max_tokens=1), make_request("b", [3] * 5, max_tokens=1))
    assert steps == [[("long", 11), ("a", 4), ("b", 5)], [("long", 20)], [("long", 9)]]


def test_a_prompt_that_is_cached_for_the_most_part_counts_as_short() -> None:
    prefix = list(range(1, 41))
    steps = _beside_a_long_prompt(make_request("hit", [*prefix, 2, 3], max_tokens=1), cached=prefix)
    assert steps[0] == [("long", 18), ("hit", 2)]


def test_those_alongside_a_long_prompt_get_no_more_than_half_of_the_step() -> None:
    behind = [make_request(f"{index}", [index] * 4, max_tokens=1) for index in range(4)]
    steps = _beside_a_long_prompt(*behind)
    assert steps[0] == [("long", 12), ("0", 4), ("1", 4)]
    assert steps[1] == [("long", 12), ("2", 4), ("3", 4)]


def test_a_second_long_prompt_waits_for_the_first() -> None:
    steps = _beside_a_long_prompt(
        make_request("other", [2] * 30, max_tokens=1), make_request("short", [3], max_tokens=1)
    )
    assert steps[0] == [("long", 20)], "nobody overtakes the other long one either"
    assert steps[1] == [("long", 20)]


def test_a_prompt_whose_rest_fits_the_step_gets_it_whole() -> None:
    steps = _beside_a_long_prompt(make_request("early", [2] * 2, max_tokens=1))
    assert steps[-1][0] == ("long", 2)


def test_cold_prompts_do_not_evict_a_prefix_that_was_shared() -> None:
    engine = Engine(make_config(num_blocks=40))
    shared = list(range(1, 17))
    for index in range(2):
        engine.run(make_request(f"tenant {index}", [*shared, 40 + index], max_tokens=2))
    for index in range(30):
        engine.run(make_request(f"cold {index}", [index, *range(20, 36)], max_tokens=2))
    (again,) = engine.run(make_request("again", [*shared, 45], max_tokens=2))
    assert _cached(again) == 16
    assert engine.core.scheduler.kv.pool.num_evicted > 40


def test_a_preempted_request_that_finds_its_own_blocks_does_not_make_them_hot() -> None:
    engine = Engine(make_config(num_blocks=22))
    engine.run(*_crowd())
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().prefix_cache_hits == 0
    for block_id in range(22):
        assert not engine.core.scheduler.kv.pool._reused[block_id]


def test_max_num_seqs_bounds_who_runs() -> None:
    engine = Engine(make_config(max_num_seqs=2))
    engine.run(*[make_request(f"{i}", PROMPT) for i in range(5)])
    assert max(len(plan.rows) for plan in engine.worker.plans) == 2


def test_requests_are_admitted_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_num_seqs=2, num_blocks=20))
    engine.run(make_request("big", [1] * 40), make_request("bigger", [2] * 50), make_request("small", [3]))
    started = dict.fromkeys(new.request_id for plan in engine.worker.plans for new in plan.new_requests)
    assert list(started) == ["big", "bigger", "small"], "though blocks for the small one were free from the start"


def _hit_after(prompt: list[int], later: list[int], **changes: object) -> Output:
    engine = Engine(make_config(**changes))
    engine.run(make_request("first", prompt, max_tokens=1))
    return engine.run(make_request("later", later, max_tokens=8))[0]


def _cached(output: Output) -> int:
    assert output.stats is not None
    return output.stats.num_cached_tokens


def test_a_hit_keeps_its_last_full_block() -> None:
    assert _cached(_hit_after(list(range(1, 10)), list(range(1, 10)))) == 8
    assert _cached(_hit_after(list(range(1, 10)), [*range(1, 9), 40, 41])) == 8


def test_a_hit_leaves_one_token_to_compute() -> None:
    output = _hit_after(list(range(1, 9)), list(range(1, 9)))
    assert _cached(output) == 4
    assert output.token_ids == greedy_continuation(list(range(1, 9)), 8)


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


def test_accepted_tokens_past_a_stop_are_not_published() -> None:
    engine = Engine(make_config(block_size=1))
    expected = greedy_continuation(PROMPT, 5)
    # All three drafts stand; the stop token is the first of them.
    (first,) = engine.run(make_request("a", PROMPT, max_tokens=2, seed=3))
    (second,) = engine.run(make_request("b", [*PROMPT, *expected]))
    assert first.token_ids == expected[:2]
    assert _cached(second) == 11, "prompt and the two tokens that were kept"


def test_what_a_stop_dropped_leaves_nothing_in_the_cache() -> None:
    engine = Engine(make_config(block_size=1))
    engine.run(make_request("a", PROMPT, max_tokens=2, seed=3))
    pool = engine.core.scheduler.kv.pool
    assert sum(pool.is_cached(block_id) for block_id in range(pool.num_blocks)) == 11


def test_different_salts_never_share_a_block() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT, cache_salt="a"))
    other, same = engine.run(make_request("b", PROMPT, cache_salt="b"), make_request("again", PROMPT, cache_salt="a"))
    assert (_cached(other), _cached(same)) == (0, 8)
    assert other.token_ids == same.token_ids


def test_two_equal_prompts_in_one_step_keep_their_own_blocks() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT))
    engine.add(make_request("b", PROMPT))
    engine.step()
    a, b = engine.core.scheduler.running.values()
    assert set(a.block_ids).isdisjoint(b.block_ids)
    pool = engine.core.scheduler.kv.pool
    assert [pool.is_cached(block_id) for block_id in a.block_ids[:3]] == [True, True, False]
    assert not any(pool.is_cached(block_id) for block_id in b.block_ids)


def test_requests_that_run_share_the_blocks_of_a_hit() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT))
    engine.step()
    engine.add(make_request("b", PROMPT))
    engine.step()
    a, b = engine.core.scheduler.running.values()
    assert a.block_ids[:2] == b.block_ids[:2]
    assert set(a.block_ids[2:]).isdisjoint(b.block_ids[2:])


def _crowd(**sampling: object) -> list:
    return [make_request(f"r{i}", [20 + i, *PROMPT], max_tokens=24, **({"seed": i} | sampling)) for i in range(5)]


def test_the_latest_arrival_is_preempted_and_the_oldest_never() -> None:
    engine = Engine(make_config(num_blocks=20, enable_prefix_caching=False))
    outputs = engine.run(*_crowd())
    preemptions = [output.stats.num_preemptions for output in outputs if output.stats is not None]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0
    assert engine.core.stats().num_preemptions == sum(preemptions)


def test_a_preempted_request_waits_until_its_decode_row_fits_too() -> None:
    engine = Engine(make_config(num_blocks=40, block_size=1, enable_prefix_caching=False))
    old = make_request("old", PROMPT, max_tokens=24, num_speculative_tokens=0)
    young = make_request("young", PROMPT, max_tokens=12, seed=0)
    _, output = engine.run(old, young)
    assert output.stats is not None
    assert output.stats.num_preemptions == 1


def test_preemption_changes_no_output() -> None:
    for temperature in (0.0, 1.0):
        for caching in (False, True):
            config = make_config(num_blocks=20, enable_prefix_caching=caching, max_num_batched_tokens=17)
            engine = Engine(config)
            requests = _crowd(temperature=temperature)
            outputs = engine.run(*requests)
            assert engine.core.stats().num_preemptions > 0
            for request, output in zip(requests, outputs, strict=True):
                assert output.token_ids == run_alone(request, config).token_ids


def test_a_resumed_request_computes_up_to_its_anchor_and_drafts_from_it() -> None:
    engine = Engine(make_config(num_blocks=20, enable_prefix_caching=False))
    engine.run(*_crowd(seed=0))
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
        config = make_config(num_blocks=20, drafter_max_len=drafter_max_len, enable_prefix_caching=False)
        crowded = Engine(config)
        requests = _crowd(temperature=1.0, seed=2)
        crowded.run(*requests)
        for request in requests:
            alone = Engine(make_config(num_blocks=64, drafter_max_len=drafter_max_len, enable_prefix_caching=False))
            alone.run(request)
            assert _verified_blocks(crowded, request.request_id) == _verified_blocks(alone, request.request_id)


def test_resuming_does_not_count_as_a_prefix_hit() -> None:
    engine = Engine(make_config(num_blocks=20))
    outputs = engine.run(*_crowd())
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens == stats.prefix_cache_queries == 5 * 10
    assert stats.prefix_cache_hits == sum(_cached(output) for output in outputs) == 0


def test_a_hit_on_all_but_the_anchor_still_leaves_a_row_to_draft_from() -> None:
    engine = Engine(make_config(block_size=1, num_blocks=60))
    engine.add(make_request("old", [40], max_tokens=40, seed=3))
    engine.add(make_request("young", PROMPT, max_tokens=20, seed=3))
    engine.step()
    engine.step()
    scheduler = engine.core.scheduler
    request = scheduler.running["young"]
    computed = request.num_computed
    scheduler._preempt(request)
    engine.step()
    resumed = engine.rows_of("young")[-1]
    assert (resumed.num_computed, resumed.num_new, resumed.sample) == (computed - 1, 1, False)
    assert resumed.num_next_draft == 3
    while engine.core.has_unfinished():
        engine.step()
    assert engine.outputs["young"].token_ids == greedy_continuation(PROMPT, 20)


def test_when_the_last_request_is_gone_every_block_is_free() -> None:
    engine = Engine(make_config(num_blocks=20))
    engine.run(*_crowd())
    engine.core.check_invariants()
    pool = engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks
    assert all(pool.ref_count(block_id) == 0 for block_id in range(pool.num_blocks))


def test_the_guard_names_only_blocks_from_the_first_uncomputed_position_on() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT))
    engine.add(make_request("b", PROMPT))
    engine.step()
    plan = engine.worker.plans[-1]
    assert plan.writable_block_ids == {"b": frozenset(plan.rows[0].new_block_ids[2:])}


def test_without_the_guard_plans_carry_no_sets() -> None:
    engine = Engine(make_config(kv_write_guard=False))
    engine.run(make_request("a", PROMPT))
    assert all(plan.writable_block_ids is None for plan in engine.worker.plans)
