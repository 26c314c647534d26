"""Which device the engine runs on, and whether this machine has what that takes. Checked before anything is loaded."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.cores import usable_cores
from dflash_backend.error_text import first_line
from dflash_backend.worker.batch_parallel import num_op_threads

# Either is there when the NVIDIA driver is, whether or not this torch can use it.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))
COMPILERS = ("cc", "gcc", "clang")


def choose_device(config: EngineConfig) -> torch.device:
    """The device that the setting `device` asks for; with `auto` the GPU where there is one.

    Raises `ConfigError` when a GPU is asked for, or is there, and torch cannot use it: a server that falls back to the
    CPU answers, some hundred times slower, and nothing says why.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        prepare_gpu()
        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError(f"setting 'device' is 'cuda', but torch sees no GPU here ({_reason()}); use 'cpu' or 'auto'")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # on purpose
    if not is_hidden and any(file.exists() for file in DRIVER_FILES):
        raise ConfigError(
            f"this machine has an NVIDIA driver, and torch {torch.__version__} cannot use it: {_reason()}. Install the "
            "build of torch that fits the driver (with `make setup TORCH_INDEX=URL` it comes from that package index), "
            "or set device=cpu to run without the GPU"
        )
    return torch.device("cpu")


def prepare_gpu() -> None:
    """What a process on a GPU needs before it loads. Raises `ConfigError` where kernels cannot be launched."""
    _check_compiler()
    # Matrix products that are split along their sum add the parts in float32. By default torch lets cuBLAS add them in
    # the result's 16 bits. A verification and a plain decode step split differently, so more of their greedy tokens
    # would differ than reduction order alone accounts for.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def num_cores(config: EngineConfig) -> int:
    """Cores that this engine may keep busy on a CPU: those that the process may use, shared out to the engines of
    `data_parallel_size`."""
    return max(1, usable_cores() // config.data_parallel_size)


def num_rank_threads(weight_bytes: int, num_sharers: int) -> int:
    """How many threads an operation has in this process, a rank of `tensor_parallel_size`: for models of
    `weight_bytes`, with the cores that it shares with others, `num_sharers` in all. Each rank asks on its own machine,
    since machines differ."""
    return num_op_threads(weight_bytes, usable_cores() // num_sharers)


def share_cores(config: EngineConfig, device: torch.device) -> None:
    """Give torch's operations this engine's share of the cores, on a CPU: torch counts them without the process's CPU
    limit and without the other engines."""
    if device.type == "cpu" and num_cores(config) < torch.get_num_threads():
        torch.set_num_threads(num_cores(config))


def _reason() -> str:
    """Why torch cannot use a GPU, in its own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "it found no device"


def _check_compiler() -> None:
    """Triton compiles a small C module for each kernel's launcher."""
    compiler = os.environ.get("CC")
    if not (compiler and shutil.which(compiler)) and not any(map(shutil.which, COMPILERS)):
        raise ConfigError(
            "the GPU kernels need a C compiler to be launched, and none of cc, gcc and clang is on the PATH; install "
            "one (Debian, Ubuntu: `apt install gcc`), or name it in the environment variable CC"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise ConfigError(
            f"the GPU kernels need Python's C headers to be launched, and {header} is missing; install them (Debian, "
            f"Ubuntu: `apt install python{sysconfig.get_python_version()}-dev`)"
        )
