"""The steps that memory is measured with are steps that the scheduler could make, and there are no larger ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dflash_backend.core.plan import SchedulerOutput
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.worker.memory import decode_step, prefill_step
from tests.support.tiny_models import make_pair
from tests.worker.engines import device_runner, engine


def limits(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, k: int, drafter: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=1,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue_size=1,
        enable_prefix_caching=False,
        num_speculative_tokens=k,
        lookahead_base=1 if k else 0,
        drafter_max_len=drafter,
    )


def steps(bounds: SchedulerConfig) -> tuple[SchedulerOutput, SchedulerOutput]:
    prefill = prefill_step(bounds)
    return prefill, decode_step(bounds, prefill)


GRID = [
    limits(max_len, seqs, tokens, k, drafter if k else 0)
    for max_len, seqs, tokens, k, drafter in itertools.product(
        (2, 17, 18, 300), (1, 3, 64), (16, 100, 4096), (0, 7, 15), (12, 17, 400)
    )
]


def test_no_row_and_no_step_passes_a_bound() -> None:
    for bounds, plan in [(given, plan) for given in GRID for plan in steps(given)]:
        assert 1 <= len(plan.rows) <= bounds.max_num_seqs
        assert plan.num_tokens <= bounds.max_num_batched_tokens
        for row in plan.rows:
            end = row.num_computed + row.num_new + row.num_draft
            assert row.num_computed >= 0
            assert row.num_new >= 1
            assert end <= bounds.max_model_len - 1 + row.num_draft
            assert end + 1 <= bounds.max_drafting_len or not row.num_draft
            if row.num_next_draft:
                assert end + 1 + row.num_next_draft <= bounds.max_drafting_len, "WINDOW"
            reserved = end + bounds.lookahead[row.num_next_draft]
            assert len(row.new_block_ids) * bounds.block_size >= reserved, "RESERVE"
            assert set(row.new_block_ids) == {0}


def test_a_prefill_step_is_full_and_reaches_the_longest_request() -> None:
    plan = prefill_step(limits(300, 64, 4096, 7, 400))
    assert (plan.num_tokens, len(plan.rows)) == (4096, 64)
    plan = prefill_step(limits(30000, 64, 4096, 7, 40000))
    first = plan.rows[0]
    assert first.num_computed + first.num_new == 30000 - 1
    assert (plan.num_tokens, len(plan.rows)) == (4096, 64)


def test_a_prefill_step_takes_all_that_few_short_requests_can_bring() -> None:
    assert prefill_step(limits(300, 3, 4096, 7, 400)).num_tokens == 3 * 299


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "k", "num_rows"),
    # Without a drafter a row is one token; no more requests decode than a step has tokens for.
    [(4096, 7, 64), (4096, 0, 64), (100, 7, 100 // 8)],
)
def test_a_decode_step_has_every_request_with_all_its_drafts_and_proposes_as_many(
    max_num_batched_tokens: int, k: int, num_rows: int
) -> None:
    _, plan = steps(limits(300, 64, max_num_batched_tokens, k, 400 if k else 0))
    assert [(row.num_new, row.num_draft, row.num_next_draft) for row in plan.rows] == [(1, k, k)] * num_rows


def test_the_longest_request_of_a_decode_step_has_all_its_drafts() -> None:
    _, plan = steps(limits(300, 64, 4096, 7, 400))
    assert max(row.num_computed for row in plan.rows) == 300 - 2 * 7 - 2


def test_a_step_ends_the_requests_of_the_one_before_and_adds_its_own() -> None:
    bounds = limits(300, 3, 100, 7, 400)
    first, second = steps(bounds)
    third = decode_step(bounds, second)
    fourth = prefill_step(bounds, 40, third)
    assert [plan.step_id for plan in (first, second, third, fourth)] == [0, 1, 2, 3]
    assert second.finished_req_ids == [request.request_id for request in first.new_requests]
    assert third.finished_req_ids == [request.request_id for request in second.new_requests]
    assert fourth.finished_req_ids == [request.request_id for request in third.new_requests]
    assert (first.num_tokens, fourth.num_tokens) == (100, 40)
    for plan in (first, second, third, fourth):
        assert [request.request_id for request in plan.new_requests] == [row.request_id for row in plan.rows]
        known = [row.num_computed + row.num_new for row in plan.rows]
        assert [len(request.token_ids) for request in plan.new_requests] == known


def test_a_device_runner_takes_these_steps_over_a_single_block(tmp_path: Path) -> None:
    built = engine(**make_pair(tmp_path), max_model_len=48, max_num_seqs=3, max_num_batched_tokens=60)
    bounds = built.core.config
    first, second = steps(bounds)
    runner = device_runner(built, padded=False)
    third = decode_step(bounds, second)
    for plan in (first, second, third, prefill_step(bounds, 20, third)):
        runner.submit(plan)
        assert [len(row.token_ids) >= 1 for row in runner.collect_results().rows] == [True] * 3
