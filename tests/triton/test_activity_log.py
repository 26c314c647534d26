"""The line every ten seconds: what is in it, and when there is none."""

from __future__ import annotations

from dflash_backend.messages import EngineStats
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.triton.activity_log import INTERVAL_S, ActivityLog


def begun(stats: EngineStats | None = None) -> ActivityLog:
    """A log whose first interval begins at 0, with the engine's counters at `stats`."""
    activity = ActivityLog()
    if stats is not None:
        activity.follow(stats)
    assert activity.line(0.0) is None
    return activity


def test_rates_are_those_of_the_time_since_the_last_line():
    activity = begun()
    drafts = SpecDecodingStats(100, 400, 350)
    cached = {"spec_decoding": drafts, "prefix_cache_queries": 600, "prefix_cache_hits": 150, "num_prompt_tokens": 100}
    running = {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage": 0.25}
    activity.follow(EngineStats(num_generation_tokens=200, **running, **cached))
    assert activity.line(INTERVAL_S) == (
        "activity: prompt 10.0 tokens/s, generated 20.0 tokens/s, acceptance length 4.50, prefix hits 25.0%, "
        "running 3, waiting 2, KV blocks in use 25.0%"
    )
    activity.follow(EngineStats(num_generation_tokens=220, **cached))
    line = activity.line(3 * INTERVAL_S)
    assert line.startswith("activity: prompt 0.0 tokens/s, generated 1.0 tokens/s, no drafts, no prefix look-ups")


def test_there_is_one_line_every_ten_seconds():
    activity = begun()
    activity.follow(EngineStats(num_requests_running=1))
    assert INTERVAL_S == 10.0
    assert activity.line(INTERVAL_S - 0.1) is None
    assert activity.line(INTERVAL_S) is not None
    assert activity.line(INTERVAL_S + 0.1) is None


def test_a_server_with_nothing_to_do_is_silent():
    activity = begun()
    activity.follow(EngineStats(num_generation_tokens=10))
    assert activity.line(INTERVAL_S) is not None
    assert activity.line(2 * INTERVAL_S) is None


def test_requests_that_make_no_progress_are_said():
    activity = begun()
    activity.follow(EngineStats(num_requests_running=1))
    assert "generated 0.0 tokens/s" in activity.line(INTERVAL_S)


def test_after_a_restart_the_counters_begin_at_zero():
    activity = begun()
    activity.follow(EngineStats(num_generation_tokens=5000))
    activity.line(INTERVAL_S)
    activity.restart()
    activity.follow(EngineStats(num_generation_tokens=10))
    line = activity.line(2 * INTERVAL_S)
    assert "generated 1.0 tokens/s" in line


def test_a_line_is_about_all_engines_also_when_one_begins_anew():
    activity = ActivityLog()
    assert activity.line(0.0) is None
    usage = {"num_requests_running": 2, "num_requests_waiting": 1}
    activity.follow(EngineStats(num_generation_tokens=100, kv_cache_usage=0.5, **usage), 0)
    activity.follow(EngineStats(num_generation_tokens=300, kv_cache_usage=0.1, **usage), 1)
    line = activity.line(INTERVAL_S)
    assert "generated 40.0 tokens/s" in line
    assert line.endswith("running 4, waiting 2, KV blocks in use 30.0%")
    activity.restart(1)
    activity.follow(EngineStats(num_generation_tokens=50), 1)
    assert "generated 5.0 tokens/s" in activity.line(2 * INTERVAL_S)


def test_each_figure_of_a_line_is_of_all_engines_which_have_unlike_parts():
    activity = ActivityLog()
    before = EngineStats(num_prompt_tokens=7, num_generation_tokens=9, prefix_cache_queries=11, prefix_cache_hits=3)
    activity.follow(before, 0)
    assert activity.line(0.0) is None
    activity.line(INTERVAL_S)
    few, many = SpecDecodingStats(10, 70, 15), SpecDecodingStats(90, 400, 335)
    one = EngineStats(3, 0, 0.9, 0, 11 + 50, 3 + 10, few, num_prompt_tokens=7 + 100, num_generation_tokens=9 + 25)
    two = EngineStats(1, 5, 0.1, 0, 350, 290, many, num_prompt_tokens=300, num_generation_tokens=425)
    activity.follow(one, 0)
    activity.follow(two, 1)
    assert activity.line(2 * INTERVAL_S) == (
        "activity: prompt 40.0 tokens/s, generated 45.0 tokens/s, acceptance length 4.50, prefix hits 75.0%, "
        "running 4, waiting 5, KV blocks in use 50.0%"
    )


def spoken(num_finished: int, *drafts: SpecDecodingStats) -> ActivityLog:
    """A log after so many requests, with an engine for each of `drafts`."""
    activity = ActivityLog()
    for _ in range(num_finished):
        activity.note_finished()
    for index, counts in enumerate(drafts):
        activity.follow(EngineStats(spec_decoding=counts), index)
    return activity


def test_a_drafter_of_which_next_to_nothing_is_accepted_is_said_once():
    activity = spoken(20, SpecDecodingStats(300, 1200, 10), SpecDecodingStats(200, 800, 15))
    said = activity.warning()
    assert said is not None
    assert said.startswith("next to no draft is accepted: acceptance length 1.05 over 500 steps with drafts, of 20 req")
    assert "inspect TARGET --draft DRAFTER" in said
    assert activity.warning() is None


def test_what_was_looked_up_does_not_hide_a_drafter_that_is_of_no_use():
    own, looked_up = SpecDecodingStats(500, 7500, 10, []), SpecDecodingStats(300, 4500, 4000, [])
    activity = spoken(20)
    activity.follow(EngineStats(spec_decoding=own + looked_up, lookup=looked_up))
    said = activity.warning()
    assert said is not None
    assert "acceptance length 1.02 over 500 steps" in said


def test_few_requests_few_steps_and_drafts_that_are_accepted_are_no_reason_to_warn():
    bad = SpecDecodingStats(500, 2000, 0)
    assert spoken(19, bad).warning() is None
    assert spoken(20, SpecDecodingStats(499, 2000, 0)).warning() is None
    assert spoken(20, SpecDecodingStats(500, 2000, 26)).warning() is None
    assert spoken(20).warning() is None
    assert spoken(20, bad).warning() is not None
