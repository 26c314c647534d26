"""Memory in huge pages, and the memory that each thread writes anew."""

from __future__ import annotations

import itertools
import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread

import psutil
import pytest
import torch

from dflash_backend.attention import KVLayer
from dflash_kernels import huge_pages
from dflash_kernels.huge_pages import ALIGNMENT, ARENA, HUGE_PAGE, Scratch, weight_memory, zeroed_memory


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_memory_is_zeros_from_a_huge_page_on(num_bytes: int) -> None:
    memory = zeroed_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.ctypes.data % HUGE_PAGE == 0
    assert not memory.any()
    memory[:] = 1
    assert memory.all()


def mode_at(address: int) -> str:
    """Of the mapping that an address lies in, as /proc has it."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = re.match("([0-9a-f]+)-([0-9a-f]+) (\\S+)", line)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            return found[3]
    return ""


def resident_bytes() -> int:
    """Of this process."""
    return int(psutil.Process().memory_info().rss)


def test_memory_is_the_processs_own_since_shared_memory_gets_no_huge_pages() -> None:
    memory = zeroed_memory(3 * HUGE_PAGE)
    assert mode_at(memory.ctypes.data) == "rw-p"


def test_memory_goes_back_to_the_system_with_its_last_user() -> None:
    memory = zeroed_memory(64 << 20)
    memory[:] = 1
    part = torch.from_numpy(memory)[5:9]
    del memory
    before = resident_bytes()
    assert part.tolist() == [1] * 4
    del part
    assert before - resident_bytes() > 48 << 20


def test_a_thread_that_ends_gives_its_scratch_back() -> None:
    scratch = Scratch(64 << 20)
    before = resident_bytes()

    def write() -> None:
        found = scratch.empty(1, 64 << 20, torch.uint8)
        assert found is not None
        found.fill_(1)

    for _ in range(3):
        (thread := Thread(target=write)).start()
        thread.join()
    assert resident_bytes() - before < 48 << 20


def test_the_system_is_asked_for_huge_pages() -> None:
    memory = zeroed_memory(3 * HUGE_PAGE)
    address, flags = int(memory.ctypes.data), ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_own = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and is_own:
            flags = line
    assert (" hg" in flags) is Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_memory_that_no_system_has_is_said_to_be_too_much(num_bytes: int) -> None:
    with pytest.raises(MemoryError, match=f"no {num_bytes} bytes"):
        zeroed_memory(num_bytes)


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", 99)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(99)
    assert not zeroed_memory(HUGE_PAGE).any()


def test_each_thread_has_scratch_of_its_own_and_gets_it_again() -> None:
    scratch, both = Scratch(HUGE_PAGE), Barrier(2)

    def address(_: int) -> int:
        both.wait()
        found = scratch.empty(2, 3, torch.float32)
        assert found is not None
        assert (found.shape, found.dtype) == ((2, 3), torch.float32)
        again = scratch.empty(1, 8, torch.uint8)
        assert again is not None
        assert again.data_ptr() == found.data_ptr()
        both.wait()
        return found.data_ptr()

    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(address, range(2)))) == 2
    assert scratch.empty(1, HUGE_PAGE, torch.uint8) is not None
    assert scratch.empty(1, HUGE_PAGE // 2 + 1, torch.bfloat16) is None, "more than there is"
    of_large = Scratch(HUGE_PAGE, 64)
    assert of_large.empty(1, 15, torch.float32) is None
    assert of_large.empty(1, 16, torch.float32) is not None


def test_a_thread_that_asks_first_in_inference_mode_can_write_there_outside_of_it() -> None:
    scratch = Scratch(HUGE_PAGE)

    def write() -> torch.Tensor | None:
        with torch.inference_mode():
            scratch.empty(1, 1, torch.float32)
        found = scratch.empty(1, 1, torch.float32)
        return None if found is None else found.fill_(3.0)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(write).result() == torch.tensor([[3.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [0, HUGE_PAGE])
def test_what_is_gathered_there_is_what_is_gathered_elsewhere(num_bytes: int, dtype: torch.dtype) -> None:
    layer = KVLayer(torch.randn(9, 4, 2, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype))
    pieces, scratch = torch.tensor([3, 0, 8, 3]), Scratch(num_bytes)
    found = layer.gather(pieces, 4, dtype, scratch)
    assert torch.equal(found, layer.gather(pieces, 4, dtype))
    before = found.clone()
    again = layer.gather(pieces.flip(0), 4, dtype, scratch)
    assert torch.equal(again, before.flip(0))
    assert (found.data_ptr() == again.data_ptr()) is (num_bytes > 0)
    other = layer.gather(pieces, 4, torch.float64, scratch)
    layer.gather(pieces.flip(0), 4, dtype, scratch)
    assert torch.equal(other, before.double()), "a copy in another dtype is not there"


def test_weights_lie_one_after_the_other_each_in_a_storage_of_its_own() -> None:
    sizes = [1, 100, ARENA // 8, 64, ARENA + 1, 5] + [ARENA // 8] * 12 + [ARENA]
    weights = [weight_memory(size) for size in sizes]
    assert [weight.untyped_storage().nbytes() for weight in weights] == sizes
    assert not any(weight.any() for weight in weights)
    assert all(weight.data_ptr() % ALIGNMENT == 0 for weight in weights)
    for number, weight in enumerate(weights):
        weight.fill_(number + 1)
    assert all(bool((weight == number + 1).all()) for number, weight in enumerate(weights))
    starts = sorted(weight.data_ptr() for weight in weights)
    assert sum(after - before < HUGE_PAGE for before, after in itertools.pairwise(starts)) >= 2


def test_memory_of_weights_goes_back_to_the_system_with_the_last_of_an_arena() -> None:
    weights = [weight_memory(ARENA // 16) for _ in range(64)]
    for weight in weights:
        weight.fill_(1)
    del weight
    before = resident_bytes()
    weights.clear()
    assert before - resident_bytes() > 2 * ARENA


def test_weights_of_a_few_huge_pages_take_little_more_than_their_bytes() -> None:
    size, before = 2 * HUGE_PAGE + 70_000, resident_bytes()
    weights = [weight_memory(size) for _ in range(28)]
    for weight in weights:
        weight.fill_(1)
    assert resident_bytes() - before < 1.15 * size * len(weights)


def test_a_large_weight_has_memory_of_its_own() -> None:
    weight = weight_memory(2 * ARENA)
    weight.fill_(1)
    kept, before = weight_memory(1), resident_bytes()
    del weight
    assert before - resident_bytes() > ARENA
    assert kept.tolist() == [0]
