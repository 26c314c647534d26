"""Acceptance counts what was delivered: 1 + accepted / drafts is the mean number of tokens of a drafting step."""

from __future__ import annotations

import pytest

from dflash_backend.core import spec_counts
from dflash_backend.core.spec_counts import RequestYields, SpecDecodingCounts
from dflash_backend.messages import RequestStats
from dflash_backend.spec_stats import SpecDecodingStats
from tests.core.toy_engine import Engine, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def _rows_without_drafts(engine: Engine, request_id: str) -> int:
    return sum(row.sample and not row.num_draft for row in engine.rows_of(request_id))


@pytest.mark.parametrize("max_tokens", range(1, 24))
@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_an_answer_is_counted_once(max_tokens: int, seed: int) -> None:
    engine = Engine(make_config())
    (output,) = engine.run(make_request("a", PROMPT, seed=seed, max_tokens=max_tokens))
    spec = engine.outputs["a"].stats.spec_decoding
    assert len(output.token_ids) == max_tokens
    assert spec.num_drafts + spec.num_accepted_tokens + _rows_without_drafts(engine, "a") == max_tokens
    assert spec.num_accepted_tokens == sum(spec.num_accepted_tokens_per_pos)
    assert engine.core.stats().spec_decoding == spec


def test_drafts_past_the_end_of_an_answer_are_no_gain() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT, seed=ALL_ACCEPTED, max_tokens=2))
    spec = engine.outputs["a"].stats.spec_decoding
    assert (spec.num_drafts, spec.num_draft_tokens, spec.acceptance_length) == (1, 3, 1.0)


@pytest.mark.parametrize("num_kept", range(1, 10))
@pytest.mark.parametrize("overlap", [False, True])
def test_what_lies_past_a_stop_string_is_taken_back(num_kept: int, overlap: bool) -> None:
    """9 tokens are out, in steps of 1, 4 and 4, when the stub says how many of them belong to the answer."""
    engine = Engine(make_config(), lag=1 if overlap else None)
    engine.add(make_request("a", PROMPT, seed=ALL_ACCEPTED, max_tokens=40, stop=("x",)))
    while len(engine.outputs["a"].token_ids) < 9:
        engine.step()
    before = engine.core.stats().spec_decoding
    engine.core.abort(["a"], {"a": num_kept})
    assert engine.core.stats().spec_decoding == before, "a counter does not decrease"
    spec = engine.core._spec_counts.delivered
    assert 1 + spec.num_drafts + spec.num_accepted_tokens == num_kept
    assert spec.num_draft_tokens == 3 * spec.num_drafts == 3 * -(-(num_kept - 1) // 4)
    assert sum(spec.num_accepted_tokens_per_pos) == spec.num_accepted_tokens


@pytest.mark.parametrize("num_kept", range(1, 10))
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_it_is_taken_back_also_when_the_request_has_ended_by_itself_meanwhile(num_kept: int, reason: str) -> None:
    engine = Engine(make_config())
    limit = {"length": {"max_tokens": 9}, "abort": {"max_tokens": 40, "deadline_s": 2.0}}[reason]
    engine.add(make_request("a", PROMPT, seed=ALL_ACCEPTED, stop=("x",), **limit))
    while len(engine.outputs["a"].token_ids) < 9:
        engine.step()
    engine.clock.now = 2.0
    engine.step()
    output = engine.outputs["a"]
    assert (output.finish_reason, len(output.token_ids)) == (reason, 9)
    # An abort without a count, as of a client that has gone, says nothing of the text.
    engine.core.abort(["a"])
    for _ in range(2):  # the second finds nothing to take back
        engine.core.abort(["a"], {"a": num_kept})
        spec = engine.core._spec_counts.delivered
        assert 1 + spec.num_drafts + spec.num_accepted_tokens == num_kept
        assert spec.num_draft_tokens == 3 * spec.num_drafts == 3 * -(-(num_kept - 1) // 4)
        assert sum(spec.num_accepted_tokens_per_pos) == spec.num_accepted_tokens


def test_the_yields_of_requests_that_have_ended_are_forgotten_when_they_are_many(monkeypatch) -> None:
    monkeypatch.setattr(spec_counts, "MAX_STEPS", 5)
    stops = SpecDecodingCounts(3)
    yields = {name: RequestYields() for name in ("a", "b", "b again")}
    for name, steps in yields.items():
        for _ in range(2):
            steps.note(3, 4)
        stops.remember(name[0], steps)
    assert stops.take_ended("a") is None
    assert stops.take_ended("b") is yields["b again"], "an id may be used again"
    assert stops.take_ended("b") is yields["b"]
    assert stops.take_ended("b") is None
    assert stops._num_ended_steps == 0


def test_a_counter_goes_on_where_it_would_be_without_what_was_taken_back() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT, seed=ALL_ACCEPTED, max_tokens=40, stop=("x",)))
    while len(engine.outputs["a"].token_ids) < 9:
        engine.step()
    engine.core.stats()
    engine.core.abort(["a"], {"a": 2})
    engine.run(make_request("b", PROMPT, seed=ALL_ACCEPTED, max_tokens=30))
    b, total = engine.outputs["b"].stats.spec_decoding, engine.core.stats().spec_decoding
    assert (total.num_drafts, total.num_accepted_tokens) == (1 + b.num_drafts, b.num_accepted_tokens)


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_sums_are_those_by_position_also_where_a_correction_waits(adaptive: bool) -> None:
    """It waits for others at its position, which do not come once the engine is idle."""
    engine = Engine(make_config(adaptive_speculation=adaptive))
    engine.add(make_request("a", PROMPT, seed=ALL_ACCEPTED, max_tokens=40, stop=("x",)))
    while len(engine.outputs["a"].token_ids) < 9:
        engine.step()
    before = engine.core.stats()
    engine.core.abort(["a"], {"a": 3})
    # Two blocks of one draft each: others came at the first position only.
    engine.run(make_request("b", PROMPT, seed=ALL_ACCEPTED, max_tokens=5, num_speculative_tokens=1))
    stats = engine.core.stats()
    b, spec = engine.outputs["b"].stats.spec_decoding, stats.spec_decoding
    assert b.num_accepted_tokens > 0
    assert spec.num_accepted_tokens == sum(spec.num_accepted_tokens_per_pos)
    assert spec.num_accepted_tokens_per_pos[1:] == before.spec_decoding.num_accepted_tokens_per_pos[1:]
    if adaptive:
        assert spec.num_draft_tokens == sum(stats.speculation.num_draft_tokens_per_pos)
        # One of its two blocks is no part of the answer.
        drafts_of_a = before.speculation.num_draft_tokens_per_pos
        assert stats.speculation.num_draft_tokens_per_pos[0] == max(
            drafts_of_a[0] - 1 + b.num_draft_tokens, drafts_of_a[0]
        )


def test_a_last_step_is_trimmed_where_its_text_ended() -> None:
    stats = RequestStats(9, 9, 0, SpecDecodingStats(2, 6, 6, [2, 2, 2]), 0, 0.0)
    trimmed = stats.with_last_step_trimmed(4, 2)
    assert (trimmed.num_output_tokens, trimmed.spec_decoding) == (7, SpecDecodingStats(2, 6, 4, [2, 1, 1]))
    assert stats.with_last_step_trimmed(4, 4) == stats


def test_requests_that_yielded_nothing_are_not_remembered() -> None:
    """Such as those that ended in the queue: however many, they have no steps that would make others be forgotten."""
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT, max_tokens=100, stop=("x",)))
    for number in range(9):
        engine.add(make_request(f"waits{number}", PROMPT, stop=("x",)))
        engine.step()
        engine.core.abort([f"waits{number}"])
    engine.core.abort(["runs"])
    ended = engine.core._spec_counts._ended
    assert [request_id for request_id, _ in ended] == ["runs"]
