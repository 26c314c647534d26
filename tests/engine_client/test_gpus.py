"""Each of several engines sees its own GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine_client.gpus import engine_environments


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """The device files of a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({"data_parallel_size": 3}, {}, ["0", "1", "2"]),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, {}, ["0,1", "2,3"]),
        ({"data_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "3, GPU-8f"}, ["3", "GPU-8f"]),
        ({"data_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "-1"}, [None, None]),
        ({"data_parallel_size": 8, "device": "cpu"}, {}, [None] * 8),
        ({}, {"CUDA_VISIBLE_DEVICES": "3"}, [None]),
        ({"data_parallel_size": 2, "tensor_parallel_size": 8, "distributed_executor": "ray"}, {}, [None, None]),
    ],
)
def test_an_engine_sees_as_many_gpus_as_it_has_ranks(devices, settings, environ, expected):
    found = engine_environments(EngineConfig(**settings), environ, devices)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in found] == expected


def test_a_machine_without_gpus_runs_them_on_the_cpu(tmp_path):
    assert engine_environments(EngineConfig(data_parallel_size=2), {}, tmp_path) == [{}, {}]


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_too_few_gpus_are_an_error_that_says_what_would_work(devices, environ):
    config = EngineConfig(data_parallel_size=4, tensor_parallel_size=2)
    seen = "CUDA_VISIBLE_DEVICES=0 shows 1" if environ else "this machine has 4"
    with pytest.raises(ConfigError, match=f"takes 8 GPUs, and {seen} .*lower it, take KIND_MODEL, or set device=cpu"):
        engine_environments(config, environ, devices)
