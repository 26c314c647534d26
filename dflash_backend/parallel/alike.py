"""What all ranks must have alike, wherever they run: files, and the kernels that choose experts."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_backend.checkpoints.digest import checkpoint_digest
from dflash_backend.config import ConfigError
from dflash_backend.models.kv_code import COMPUTES_KV, code_digest
from dflash_kernels.cpu_library import processor_switches
from dflash_kernels.cpu_ops import HAS_CPU_OPS

# Python files that a rank runs.
CODE = (*COMPUTES_KV, Path(__file__).parent)


@dataclass(frozen=True)
class RankFiles:
    """Digests of the code and of the target's checkpoint on one machine."""

    code: bytes
    checkpoint: bytes

    @classmethod
    def here(cls, directory: Path) -> RankFiles:
        """Those of this machine. Raises `CheckpointError`, and `OSError`."""
        return cls(code_digest(CODE), checkpoint_digest(directory))


def kernels_of(device: torch.device, attention: str) -> str:
    """What the bits of a product on a device follow from beside its numbers, in words. attention: the backend."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        kind = f"{torch.cuda.get_device_name(device)} ({major}.{minor}), CUDA {torch.version.cuda}"
    else:
        built = (
            "C++ operations" if HAS_CPU_OPS else "no C++ operations (python -m dflash_kernels.cpu_library builds them)"
        )
        kind = f"{_processor()} ({' '.join(processor_switches())}), {built}"
    return f"{kind}, torch {torch.__version__}, attention by {attention}"


def check_kernels(of_rank_0: str, own: str) -> None:
    """Raises `ConfigError` where they differ: then a router of experts may choose other ones here."""
    if own != of_rank_0:
        raise ConfigError(
            "each rank chooses the target's experts by itself, so ranks must compute the same bits, and may not here. "
            f"Rank 0 has: {of_rank_0}. This rank has: {own}. Use machines and installations that are alike, or one "
            "machine"
        )


def _processor() -> str:
    """The model of this machine's processor, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def check_files(of_rank_0: RankFiles, directory: Path) -> None:
    """Raises `ConfigError` where this machine has other files than rank 0's, and as `RankFiles.here`."""
    own = RankFiles.here(directory)
    if own.code != of_rank_0.code:
        raise ConfigError(
            "the code of dflash-triton here is not that of the server's machine: install the same version on all nodes"
        )
    if own.checkpoint != of_rank_0.checkpoint:
        raise ConfigError(
            f"{directory} has other weights, or another config.json, here than on the server's machine: copy the "
            "checkpoint to this node again, or have both in a file system that they share"
        )
