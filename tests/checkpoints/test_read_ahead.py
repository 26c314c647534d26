"""Tensors are read ahead by threads, in the order of the model, within a bound, and nothing is left open."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_backend.checkpoints import CheckpointError, read_ahead, weights
from dflash_backend.checkpoints.files import part_of_bytes, read_headers
from dflash_backend.checkpoints.read_ahead import ReadAhead
from dflash_backend.checkpoints.weights import WeightSource, load_weights

CPU = torch.device("cpu")
NUM_SHARDS, PER_SHARD, SIZE = 4, 3, 1000
SHARD_BYTES = PER_SHARD * SIZE * 4
# As models take them: from several files by turns.
NAMES = [f"t{shard}.{number}" for number in range(PER_SHARD) for shard in range(NUM_SHARDS)]


def values(name: str) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + 7919 * NAMES.index(name)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for shard in range(NUM_SHARDS):
        save_file({name: values(name) for name in NAMES if name[1] == str(shard)}, tmp_path / f"{shard}.safetensors")
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_is_left(directory: Path) -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.startswith(str(directory))]


@pytest.fixture(autouse=True)
def as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "reads_ahead", lambda device: True)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 700)


def read(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: source.tensor(name, SIZE) for name in NAMES}


@pytest.mark.usefixtures("small_pieces")
def test_tensors_of_several_files_come_whole_in_the_order_of_the_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[object] = []
    monkeypatch.setattr(weights, "safe_open", lambda *args, **kwargs: mapped.append(args))
    found = load_weights(directory, read, torch.float32, CPU)
    assert all(torch.equal(found[name], values(name)) for name in NAMES)
    assert not mapped, "a tensor was not read ahead"


def test_what_is_held_stays_within_the_largest_file_and_is_read_before_it_is_asked_for(directory: Path) -> None:
    headers, most = read_headers(directory), 0
    with ReadAhead(headers, NAMES, pinned=False) as ahead:
        for name in NAMES:
            tensor = ahead.take(name)
            assert tensor is not None
            assert torch.equal(tensor, values(name))
            held = sum(memory.nbytes for memory, _ in ahead._readings.values())
            most = max(most, held)
            ahead.release(name)
    assert most == SHARD_BYTES


def test_a_tensor_above_the_bound_is_read_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "MAX_AHEAD_BYTES", SIZE)
    with ReadAhead(read_headers(directory), NAMES, pinned=False) as ahead:
        for name in NAMES:
            assert ahead.take(name) is not None
            assert len(ahead._readings) == 1
            ahead.release(name)


def test_another_order_than_the_first_time_gives_the_same_tensors(directory: Path) -> None:
    orders = iter([NAMES, NAMES[::-1]])

    def changing(source: WeightSource) -> dict[str, torch.Tensor]:
        return {name: source.tensor(name, SIZE) for name in next(orders)}

    found = load_weights(directory, changing, torch.float32, CPU)
    assert all(torch.equal(found[name], values(name)) for name in NAMES)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_a_file_that_shrank_after_its_header_was_checked_is_named(directory: Path, size: int) -> None:
    runs = iter([False, True])
    file = directory / "2.safetensors"

    def shrinking(source: WeightSource) -> dict[str, torch.Tensor]:
        if next(runs):
            os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
        return read(source)

    with pytest.raises(CheckpointError, match="2.safetensors cannot be read as safetensors: .*download or copy"):
        load_weights(directory, shrinking, torch.float32, CPU)


def test_a_model_that_fails_leaves_no_thread_and_no_file(directory: Path) -> None:
    runs = iter([False, True])

    def failing(source: WeightSource) -> torch.Tensor:
        found = read(source) if not next(runs) else {NAMES[0]: source.tensor(NAMES[0], SIZE)}
        if len(found) == 1:
            raise MemoryError("no memory")
        return found[NAMES[0]]

    with pytest.raises(MemoryError):
        load_weights(directory, failing, torch.float32, CPU)


def test_only_a_gpus_tensors_are_read_ahead() -> None:
    assert read_ahead.reads_ahead(torch.device("cuda"))
    assert not read_ahead.reads_ahead(CPU)


def test_progress_says_the_file_the_bytes_and_their_rate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, float]] = []
    load_weights(directory, read, torch.float32, CPU, progress=lambda *args: heard.append(args))
    form = re.compile(r"\d.safetensors: \d+\.\d\d of \d+\.\d\d MB, \d+\.\d\d GB/s")
    assert len(heard) == NUM_SHARDS
    assert all(form.fullmatch(message) for message, _ in heard), heard
    assert [share for _, share in heard] == sorted({share for _, share in heard})
    assert heard[-1][1] == 1.0
    monkeypatch.setattr(weights, "REPORT_S", -1.0)
    heard.clear()
    load_weights(directory, read, torch.float32, CPU, progress=lambda *args: heard.append(args))
    assert len(heard) == len(NAMES), "a large file says nothing before its end"


def test_bytes_are_in_a_unit_that_shows_them() -> None:
    assert part_of_bytes(2_500_000, 10_000_000) == "2.50 of 10.00 MB"
    assert part_of_bytes(2_500_000_000, 10_000_000_000) == "2.50 of 10.00 GB"
    assert part_of_bytes(0, 999_999_999) == "0.00 of 1000.00 MB"
    assert part_of_bytes(0, 1_000_000_000) == "0.00 of 1.00 GB"
