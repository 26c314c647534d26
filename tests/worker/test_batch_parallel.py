"""Rows are shared among threads evenly, and what goes wrong in one part is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.worker.batch_parallel import (
    INTRA_OP_TOKENS,
    MAX_WEIGHT_BYTES,
    STEPS_TO_COMPARE,
    TRY_OTHER_EVERY,
    BatchThreads,
    OpThreadChoice,
    num_batch_threads,
)
from dflash_kernels.cpu_ops import HAS_CPU_OPS


def row(name: str, num_tokens: int, num_computed: int = 0) -> ScheduledRequest:
    return ScheduledRequest(name, num_computed, num_tokens, 0, True, 0, [])


def tokens(part: list[ScheduledRequest]) -> int:
    return sum(one.num_new for one in part)


def test_parts_have_about_equal_numbers_of_tokens_and_every_row_once() -> None:
    rows = [row(str(i), 16 + 5 * (i % 3)) for i in range(31)]
    parts = BatchThreads(4).split(rows)
    assert len(parts) == 4
    assert sorted(one.request_id for part in parts for one in part) == sorted(one.request_id for one in rows)
    assert max(map(tokens, parts)) - min(map(tokens, parts)) <= 26


def test_a_prompt_as_long_as_all_others_gets_a_part_of_its_own() -> None:
    decodes = [row(f"decode {i}", 16) for i in range(16)]
    assert [len(part) for part in BatchThreads(2).split([row("prompt", 250), *decodes])] == [16, 1]


def test_long_prompts_that_cannot_be_cut_evenly_are_one_part_for_all_threads() -> None:
    decodes = [row(f"decode {i}", 1) for i in range(8)]
    assert [len(part) for part in BatchThreads(2).split([row("prompt", 1000), *decodes])] == [9]
    assert [len(part) for part in BatchThreads(2).split([row("a", 600), row("b", 300), row("c", 10)])] == [3]
    assert [len(part) for part in BatchThreads(2).split([row("a", 500), row("b", 420)])] == [1, 1]
    assert [len(part) for part in BatchThreads(8).split([row(name, 500) for name in "abc"])] == [3]
    # Where there is work for fewer cores than there are, these are cut evenly.
    assert [len(part) for part in BatchThreads(8).split([row(str(i), 16) for i in range(20)])] == [5] * 4
    # Of a step of few tokens one thread does its part in less time than threads take to meet.
    assert [len(part) for part in BatchThreads(2).split([row("a", 160), row("b", 85)])] == [1, 1]
    # A prompt's bits are those of a short one where each has one thread.
    parts = BatchThreads(2, batch_invariant=True).split([row("prompt", 1000), *decodes])
    assert [len(part) for part in parts] == [8, 1]


def test_rows_whose_drafts_differ_by_a_few_lie_beside_those_with_contexts_like_theirs() -> None:
    drafting = [(f"{context} after {drafts}", drafts, context) for context in (40, 900) for drafts in (15, 12, 14, 11)]
    rows = [ScheduledRequest(name, context, 1, drafts, True, 15, []) for name, drafts, context in drafting]
    resting = [ScheduledRequest(f"rests {n}", 500, 1, 0, True, 0, []) for n in range(2)]
    parts = BatchThreads(1).split(rows[::2] + resting + rows[1::2])
    assert [one.num_computed for one in parts[0]] == [500] * 2 + [40] * 4 + [900] * 4


def test_little_work_stays_together_and_a_lone_row_is_one_part() -> None:
    assert len(BatchThreads(2).split([row("a", 79), row("b", 80)])) == 1
    assert len(BatchThreads(2).split([row("a", 80), row("b", 80)])) == 2
    assert len(BatchThreads(8).split([row("a", 4000)])) == 1
    assert len(BatchThreads(2).split([row("a", 79), row("b", 80)], {"a"})) == 2


def test_context_is_work_too_the_more_so_the_more_tokens_look_at_it() -> None:
    assert len(BatchThreads(2).split([row(str(i), 1, 500) for i in range(16)])) == 1
    assert len(BatchThreads(2).split([row(str(i), 1, 1500) for i in range(16)])) == 2
    assert len(BatchThreads(2).split([row(str(i), 16, 500) for i in range(5)])) == 1
    assert len(BatchThreads(2).split([row(str(i), 16, 1500) for i in range(5)])) == 2
    lengths = [len(part) for part in BatchThreads(2).split([row(str(i), 1, 8000 * (i < 4)) for i in range(64)])]
    assert lengths == [62, 2]


def test_with_larger_weights_fewer_tokens_are_worth_a_thread() -> None:
    rows = [row("a", 16), row("b", 16)]
    assert len(BatchThreads(2, weight_bytes=10 * 1024**2).split(rows)) == 1
    assert len(BatchThreads(2, weight_bytes=60 * 1024**2).split(rows)) == 2


def test_parts_run_at_the_same_time_without_threads_inside_operations() -> None:
    pool = BatchThreads(2)
    parts = [[row("a", 100)], [row("b", 100)]]
    # Each part waits for the other: one after the other, they would wait in vain.
    barrier = threading.Barrier(2, timeout=30)

    def work(part: list[ScheduledRequest]) -> tuple[str, int]:
        barrier.wait()
        return part[0].request_id, torch.get_num_threads()

    before = torch.get_num_threads()
    assert pool.run(work, parts, 200) == [("a", 1), ("b", 1)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_long_prompt_has_threads_within_operations_unless_its_bits_must_be_those_of_a_short_one(
    batch_invariant: bool,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    pool = BatchThreads(2, batch_invariant)

    def of_steps(size: int, drafts: bool) -> list[int]:
        return [pool.run(lambda part: torch.get_num_threads(), [[]], size, drafts)[0] for _ in range(4)]

    long, short, drafting = of_steps(INTRA_OP_TOKENS, False), of_steps(9, False), of_steps(9, True)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    assert long == ([1] * 4 if batch_invariant else [2] * 4)
    # Short ones are tried both ways, where threads begin at once, which those of torch do not.
    both = [1, 2, 1, 2] if HAS_CPU_OPS and not batch_invariant else [1] * 4
    assert short == drafting == both


def test_operations_of_short_steps_have_as_many_threads_as_are_quickest_now() -> None:
    choice = OpThreadChoice()

    def share_of_one(number: int, seconds: Callable[[bool], float]) -> float:
        ones = 0
        for _ in range(number):
            one = choice.next_has_one.get(3, True)
            choice.observe(3, one, seconds(one))
            ones += one
        return ones / number

    assert share_of_one(STEPS_TO_COMPARE, lambda one: 2.0 if one else 1.5) == 0.5
    tried = 1 / TRY_OTHER_EVERY
    assert share_of_one(4 * TRY_OTHER_EVERY, lambda one: 2.0 if one else 1.5) == tried
    # Another process takes a core now and then: threads that share an operation wait for one another.
    share_of_one(8 * TRY_OTHER_EVERY, lambda one: 2.1 if one else 4.0)
    assert share_of_one(4 * TRY_OTHER_EVERY, lambda one: 2.1 if one else 4.0) == 1 - tried
    # And it is gone again.
    share_of_one(32 * TRY_OTHER_EVERY, lambda one: 2.0 if one else 1.5)
    assert share_of_one(4 * TRY_OTHER_EVERY, lambda one: 2.0 if one else 1.5) == tried
    # A step that took very long, of a machine that stood still, says little.
    choice.observe(3, False, 1000.0)
    assert share_of_one(8 * TRY_OTHER_EVERY, lambda one: 2.0 if one else 1.5) < 0.3
    assert choice.next_has_one.keys() == {3}  # steps of another size are compared by themselves


@pytest.mark.parametrize("failing", ["a", "b"])
def test_an_error_in_any_part_is_raised_after_all_have_ended(failing: str) -> None:
    ended = []

    def work(part: list[ScheduledRequest]) -> None:
        ended.append(part[0].request_id)
        if part[0].request_id == failing:
            raise RuntimeError(f"part {failing} failed")

    with pytest.raises(RuntimeError, match=f"part {failing} failed"):
        BatchThreads(2).run(work, [[row("a", 100)], [row("b", 100)]], 200)
    assert sorted(ended) == ["a", "b"]


def test_only_small_models_share_rows_among_threads() -> None:
    assert num_batch_threads(MAX_WEIGHT_BYTES + 1, 7) == 1
    assert num_batch_threads(1, 7) == 7
