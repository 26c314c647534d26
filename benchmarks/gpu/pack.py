"""What travels to a GPU machine that has no package index: kernels that were compiled before (`make gpu-pack`)."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

FOLDER, KERNELS, MANIFEST = ".gpu-packages", "kernels.tar.xz", "pack.json"
UNPACKED = "dflash-triton-kernels"


def kernel_key() -> str:
    """Of what Triton looks a compiled kernel up by, all that belongs to the machine: its own files, and the assembler's
    version."""
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime.cache import triton_key

    return hashlib.sha256(f"{triton_key()} {get_ptxas_version(90)}".encode()).hexdigest()


def num_kernels(cache: Path) -> int:
    """Compiled kernels in a cache of Triton's."""
    return sum(1 for _ in cache.glob("*/*.cubin"))


def unpacked(root: Path, where: Path) -> dict[str, str]:
    """Unpack the kernels that came along in a checkout: the environment variables with which Triton finds them, none
    where there are none."""
    packed = root / FOLDER / KERNELS
    if not packed.is_file():
        return {}
    cache = where / UNPACKED
    if not (cache / MANIFEST).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as archive:
            archive.extractall(cache, filter="data")
        point_to(cache)
    return {"TRITON_CACHE_DIR": str(cache)}


def point_to(cache: Path) -> None:
    """Let the entries of a cache name the files where they lie: Triton writes whole paths into it."""
    for group in cache.glob("*/__grp__*.json"):
        names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        paths = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
