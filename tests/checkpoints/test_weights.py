"""Tensors come in the dtype that is asked for, checked, and in no more memory than one file above their own size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.weights import WeightSource, load_weights

CPU = torch.device("cpu")
MIB = 1024**2
NUM_SHARDS, SHARD_MIB = 4, 48

# The dtypes that are asked for with what the tensors then take, and the ways to read.
DTYPES, WAYS = {"float32": 192, "bfloat16": 96}, ("ahead", "mapped")

# Loads a checkpoint in each dtype and way and prints for each: the peak above the start, in bytes; whether a file is
# still mapped; fractions.
LOAD = """
import json, os, sys
from pathlib import Path
import torch
from dflash_backend.checkpoints import weights
from dflash_backend.checkpoints.weights import load_weights

def memory(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) * 1024

def read(source):
    return [source.tensor(f"t{i}.{j}", 4, 1024, 1024) for i in range(4) for j in range(3)]

def load(directory, dtype, way):
    weights.reads_ahead = lambda device: way == "ahead"
    Path("/proc/self/clear_refs").write_text("5")
    before, libraries, heard = memory("VmHWM"), memory("RssFile"), []
    tensors = load_weights(directory, read, dtype, torch.device("cpu"), progress=lambda f, d: heard.append(round(d, 2)))
    mapped = ".safetensors" in Path("/proc/self/maps").read_text()
    # Of the libraries a child has in memory what it has used so far; no file of weights is there any more.
    libraries = memory("RssFile") - libraries
    return memory("VmHWM") - before - libraries, mapped, heard

torch.ones(8).to(torch.bfloat16)
for argument in sys.argv[2:]:
    dtype, way = argument.split()
    if not (child := os.fork()):  # with no memory that another one has left
        print(json.dumps(load(Path(sys.argv[1]), getattr(torch, dtype), way)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """What a process prints of each dtype and way."""
    directory = tmp_path_factory.mktemp("shards")
    for i in range(NUM_SHARDS):
        tensors = {f"t{i}.{j}": torch.full((4, 1024, 1024), float(i + j)) for j in range(3)}
        save_file(tensors, directory / f"{i}.safetensors")
    ways = [(dtype, way) for dtype in DTYPES for way in WAYS]
    command = [sys.executable, "-c", LOAD, str(directory), *map(" ".join, ways)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    shutil.rmtree(directory)
    return dict(zip(ways, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "own_mib"), DTYPES.items())
def test_loading_takes_at_most_one_shard_above_the_models_own_size(
    loaded: dict[tuple[str, str], list[Any]], dtype: str, own_mib: int, way: str
) -> None:
    used, mapped, heard = loaded[dtype, way]
    slack = 24
    assert used / MIB < own_mib + SHARD_MIB + slack
    assert used / MIB > own_mib / 2, "what is measured must see the tensors"
    assert not mapped, "a tensor that looks into a file keeps it mapped"
    assert heard == [0.25, 0.5, 0.75, 1.0]


def load(
    directory: Path, *names: str, size: tuple[int, ...] = (2,), ignored: Callable[[str], bool] = lambda name: False
) -> dict[str, torch.Tensor]:
    """The tensors of these names and this size, of which only `d2t` is of integers."""

    def read(source: WeightSource) -> dict[str, torch.Tensor]:
        return {n: source.tensor(n, *size, dtype=torch.int64 if n == "d2t" else None) for n in names}

    return load_weights(directory, read, torch.float32, CPU, ignored=ignored)


def test_values_survive_and_are_cast(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    save_file({"a": tensor.to(torch.bfloat16), "b": tensor.half(), "c": tensor}, tmp_path / "model.safetensors")
    found = load(tmp_path, *"abc", size=(3, 4))
    assert torch.equal(found["a"], tensor.to(torch.bfloat16).float())
    assert torch.equal(found["b"], tensor.half().float())
    assert torch.equal(found["c"], tensor)
    assert all(t.dtype == torch.float32 for t in found.values())


@pytest.mark.parametrize("stored", [torch.int64, torch.int32])
def test_integers_stay_integers(tmp_path: Path, stored: torch.dtype) -> None:
    values = torch.tensor([-5, 2**30 + 1])  # not a float32
    save_file({"d2t": values.to(stored), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    found = load(tmp_path, "d2t", "w")
    assert found["d2t"].dtype == torch.int64
    assert torch.equal(found["d2t"], values)


@pytest.mark.parametrize("ignored", [lambda name: name == "t2d", lambda name: True])
def test_ignored_names_are_skipped_whatever_they_hold_unless_they_are_expected(
    tmp_path: Path, ignored: Callable[[str], bool]
) -> None:
    save_file({"w": torch.ones(2), "t2d": torch.ones(3, dtype=torch.bool)}, tmp_path / "model.safetensors")
    assert set(load(tmp_path, "w", ignored=ignored)) == {"w"}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, "tensor 'd2t' and 1 more is missing"),
        ({"d2t": torch.ones(2, dtype=torch.int64)}, "tensor 'w' is missing"),
        ({"w": torch.ones(3)}, r"tensor 'w' has shape \[3\]; config.json asks for \[2\]"),
        ({"w": torch.ones(2, dtype=torch.int64)}, "tensor 'w' is I64; expected one of F32, BF16, F16"),
        ({"w": torch.ones(2, dtype=torch.float64)}, "tensor 'w' is F64"),
        ({"d2t": torch.ones(2)}, "tensor 'd2t' is F32; expected one of I64, I32"),
        ({"x": torch.ones(2)}, r"tensor 'x' of shape \[2\] is not part of this model"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], expected: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(tmp_path, "w", "d2t")
    assert str(tmp_path) in str(caught.value)


def test_the_largest_of_several_files_without_an_index_is_not_guessed(tmp_path: Path) -> None:
    """`model.safetensors` is the checkpoint; a second copy in another layout beside it is not read."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"layers.0.w": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert set(load(tmp_path, "w")) == {"w"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_their_tensors_name(tmp_path: Path, dtype: torch.dtype) -> None:
    bad = torch.tensor([1.0, float("nan")], dtype=dtype)
    save_file({"a": torch.ones(2), "b": bad, "c": bad.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: the tensor b has values .*\(NaN\), as have 1 others"
    ):
        load(tmp_path, *"abc")
    assert load(tmp_path, "a", ignored=lambda name: True)["a"].tolist() == [1.0, 1.0]

    def read_part(source: WeightSource) -> torch.Tensor:
        out = source.empty(1)
        source.read("b", out, Slice(0, (1,), 2))
        return out

    with pytest.raises(CheckpointError, match="the tensor b has values"):
        load_weights(tmp_path, read_part, torch.float32, CPU, ignored=lambda name: True)
