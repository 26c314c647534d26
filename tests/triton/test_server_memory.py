"""When a stream must end because of what tritonserver holds."""

from __future__ import annotations

import subprocess
import sys

from dflash_backend.triton.server_memory import (
    HELD_PER_RESPONSE,
    INTERVAL_S,
    STEP_BYTES,
    ServerMemory,
    private_memory,
)

GB = 10**9


def looks(limit: int, *sizes: int) -> list[bool]:
    """What is said of memory that has these sizes, one a second; each time a stream is ended."""
    left, said = iter(sizes), []
    memory = ServerMemory(limit, lambda: next(left))
    for number in range(len(sizes)):
        said.append(memory.is_over(number * INTERVAL_S))
        if said[-1]:
            memory.note_acted()
    return said


def test_memory_below_the_limit_is_no_reason():
    assert looks(GB, 0, GB // 2, GB) == [False] * 3


def test_memory_above_it_is_one_reason_and_each_further_step_another():
    sizes = (GB + 1, GB + 2, GB + STEP_BYTES, GB + STEP_BYTES + 2, GB + STEP_BYTES + 3)
    assert looks(GB, *sizes) == [True, False, False, True, False]


def test_it_is_looked_at_once_a_second():
    memory = ServerMemory(GB, lambda: 2 * GB)
    assert [memory.is_over(now) for now in (10.0, 10.5)] == [True, False]


def test_a_limit_of_zero_is_none():
    assert looks(0, 10**15) == [False]


def owners(*looks: tuple[int, int]) -> list[str]:
    """What holds the memory at each look, which is (its growth in MB, the MB that were sent)."""
    size, said = GB - 1, []
    memory = ServerMemory(GB, lambda: size)
    assert not memory.is_over(0.0)
    for number, (growth, sent) in enumerate(looks, 1):
        size += growth << 20
        memory.note_sent(sent << 20)
        memory.is_over(number * INTERVAL_S)
        assert not (memory.is_of_responses and memory.is_of_requests)
        said.append("responses" if memory.is_of_responses else "requests" if memory.is_of_requests else "unclear")
    return said


def test_memory_that_grows_by_what_is_sent_is_that_of_responses_and_other_growth_is_that_of_requests():
    assert owners((100, 50)) == ["responses"]
    assert owners((100, 30), (100, 10)) == ["responses", "requests"]
    assert owners((100, 10)) == ["requests"]


def test_a_little_growth_may_be_of_a_request_that_still_arrives():
    assert owners((10, 1), (90, 1)) == ["unclear", "requests"]


def test_what_was_sent_before_memory_grew_accounts_for_nothing():
    assert owners((1, 500), (100, 1)) == ["responses", "requests"]


def test_each_response_holds_memory_however_short_it_is():
    size = GB
    memory = ServerMemory(GB, lambda: size)
    memory.is_over(0.0)
    for _ in range(100_000):
        memory.note_sent(2)
    size += 100_000 * HELD_PER_RESPONSE
    assert memory.is_over(INTERVAL_S)
    assert memory.is_of_responses


def test_memory_that_goes_up_and_down_is_not_taken_for_that_of_requests():
    assert owners((1, 0), (20, 0), (-20, 0), (20, 0), (-20, 0), (10, 10))[-1] == "responses"


def test_growth_below_the_limit_does_not_count():
    sizes = iter([GB // 2, GB, GB + (20 << 20)])
    memory = ServerMemory(GB, lambda: next(sizes))
    assert [memory.is_over(number * INTERVAL_S) for number in range(2)] == [False, False]
    memory.note_sent(10 << 20)
    assert memory.is_over(2 * INTERVAL_S)
    assert memory.is_of_responses


def test_what_was_acted_on_does_not_count_again():
    sizes = iter([GB, GB + (200 << 20), GB + (200 << 20) + STEP_BYTES + 1])
    memory = ServerMemory(GB, lambda: next(sizes))
    assert [memory.is_over(number * INTERVAL_S) for number in range(2)] == [False, True]
    assert memory.is_of_requests
    memory.note_acted()
    memory.note_sent(STEP_BYTES)
    assert memory.is_over(2 * INTERVAL_S)
    assert memory.is_of_responses


# Holds 64 MiB from its first line of input to its second.
HOLDER = """
import mmap, sys
held = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print("none", flush=True)
sys.stdin.readline()
for page in range(0, len(held), mmap.PAGESIZE):
    held[page] = 1
print("all", flush=True)
sys.stdin.readline()
"""


def test_the_memory_of_a_process_is_what_it_alone_holds_and_that_of_none_is_nothing():
    # Another process: in this one, threads that earlier tests have left may take memory and give it back meanwhile.
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "none\n"
        before = private_memory(holder.pid)
        holder.stdin.write("hold\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "all\n"
        held = private_memory(holder.pid) - before
        holder.communicate("end\n", timeout=10)
    assert (60 << 20) < held < (68 << 20)
    assert private_memory(2**22 + 1) == 0
