"""What all ranks must have alike, wherever they run: files, and the kernels that choose experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_backend.checkpoints.digest import checkpoint_digest
from dflash_backend.config import ConfigError
from dflash_backend.models.kv_code import COMPUTES_KV, code_digest

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
