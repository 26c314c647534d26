"""Which device the engine takes, and what is said where a GPU is there and cannot be used."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from dflash_backend import device
from dflash_backend.attention import BackendError
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.device import choose_device, num_cores, num_rank_threads, share_cores
from dflash_backend.engine.build import build_engine
from dflash_backend.worker.batch_parallel import MAX_WEIGHT_BYTES


def _config(**settings: object) -> EngineConfig:
    return EngineConfig.from_values(settings)


@pytest.fixture
def no_torch_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def driver(no_torch_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "version"
    file.touch()
    monkeypatch.setattr(device, "DRIVER_FILES", (tmp_path / "nvidia0", file))
    return file


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_driver_auto_is_the_cpu(no_torch_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DRIVER_FILES", ())
    assert choose_device(_config()).type == "cpu"


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(driver: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use it: The NVIDIA driver .* too old \(found version 12040\)\.\. "):
        choose_device(_config())
    assert choose_device(_config(device="cpu")).type == "cpu", "asked for by name"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_was_hidden_on_purpose_is_passed_over(
    driver: Path, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device(_config()).type == "cpu"


def test_a_gpu_that_is_asked_for_and_is_not_there_is_refused_with_torchs_reason(no_torch_gpu: None) -> None:
    with pytest.raises(ConfigError, match="'device' is 'cuda', but torch sees no GPU here .*too old"):
        choose_device(_config(device="cuda"))


def test_on_a_gpu_products_that_are_split_are_summed_in_float32(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_check_compiler", lambda: None)
    assert choose_device(_config()).type == "cuda"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_a_gpu_without_a_compiler_for_the_kernels_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="none of cc, gcc and clang is on the PATH"):
        choose_device(_config())


def test_a_gpu_without_pythons_headers_is_refused(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match="Python.h is missing"):
        choose_device(_config())


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"device": "cuda"}, ConfigError, "torch sees no GPU"),
        ({"attention_backend": "flash_attn"}, BackendError, "'flash_attn' is not available .*, which has .*torch"),
    ],
)
def test_what_this_machine_lacks_is_said_before_a_checkpoint_is_read(
    settings: dict[str, str], error: type[Exception], match: str, no_torch_gpu: None
) -> None:
    lines: list[str] = []
    with pytest.raises(error, match=match):
        build_engine(_config(target_model="/nowhere", **settings), lambda message, fraction: lines.append(message))
    assert lines == []


def test_engines_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    cpu = torch.device("cpu")
    for size, cores in ((1, 12), (5, 2), (40, 1)):
        config = EngineConfig(data_parallel_size=size)
        share_cores(config, cpu)
        assert num_cores(config) == cores
    share_cores(EngineConfig(data_parallel_size=5), torch.device("cuda"))
    assert threads == [2, 1], "a single engine keeps torch's own number, and a GPU's engine too"


@pytest.mark.parametrize(("num_sharers", "threads"), [(1, 12), (5, 2), (40, 1)])
def test_a_rank_shares_the_cores_of_the_machine_it_is_on(
    num_sharers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert num_rank_threads(MAX_WEIGHT_BYTES + 1, num_sharers) == threads
    assert num_rank_threads(MAX_WEIGHT_BYTES, num_sharers) == 1
