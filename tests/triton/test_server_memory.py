"""When a stream must end because of what tritonserver holds."""

from __future__ import annotations

import mmap
import os

from dflash_backend.triton.server_memory import INTERVAL_S, STEP_BYTES, ServerMemory, private_memory

GB = 10**9


def looks(limit: int, *sizes: int) -> list[bool]:
    """What is said of memory that has these sizes, one a second; each time a stream is ended."""
    left, said = iter(sizes), []
    memory = ServerMemory(limit, lambda: next(left))
    for number in range(len(sizes)):
        said.append(memory.is_over(number * INTERVAL_S))
        if said[-1]:
            memory.note_ended()
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


def test_the_memory_of_a_process_is_what_it_alone_holds_and_that_of_none_is_nothing():
    before = private_memory(os.getpid())
    # Of its own: a heap may have as much that earlier tests have freed.
    held = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(bytes(64 << 20))
    assert (48 << 20) < private_memory(os.getpid()) - before < (96 << 20)
    assert len(held) == 64 << 20
    assert private_memory(2**22 + 1) == 0
