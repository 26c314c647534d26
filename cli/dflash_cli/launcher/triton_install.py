"""Finds a `tritonserver` on this machine and what it needs to run this Python environment.

Two kinds: one on the PATH (an NGC container has it), which knows its own backends; else the one inside the
`nvidia-pytriton` package, which needs its Python backend put together: the backend's files and the stub process built
for the Python that runs here, in one folder.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class LauncherError(Exception):
    """The server could not be started or kept. The message is for the person who started it."""


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A `tritonserver`: its binary, and for the embedded one the parts of its Python backend."""

    binary: Path
    backend_files: Path | None = None
    stub: Path | None = None
    library_dirs: tuple[Path, ...] = ()

    @property
    def is_embedded(self) -> bool:
        """Whether this is the old one inside `nvidia-pytriton`, which who reaches its ports can crash."""
        return self.stub is not None

    def prepare_backends(self, directory: Path) -> list[str]:
        """Put the embedded server's Python backend together under `directory`; the options that point at it."""
        if self.backend_files is None or self.stub is None:
            return []
        python = directory / "python"
        shutil.copytree(self.backend_files, python, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(self.stub, python / self.stub.name)
        return [f"--backend-directory={directory}"]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment to run in: the stub takes the first `python3` of the PATH as its own environment.

        Triton answers from dozens of threads, and an allocator with memory of its own for each of them keeps what any
        of them ever needed: few arenas keep the server's memory flat. `engine_client.client` takes it back.
        """
        environ = {"MALLOC_ARENA_MAX": "2", **base}
        environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])
        if self.library_dirs:
            present = [base["LD_LIBRARY_PATH"]] if base.get("LD_LIBRARY_PATH") else []
            environ["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, self.library_dirs), *present])
        return environ


def find_triton(environ: Mapping[str, str]) -> TritonInstall:
    """The `tritonserver` to run. Raises `LauncherError` when there is none that can."""
    on_path = shutil.which("tritonserver", path=environ.get("PATH", os.defpath))
    if on_path:
        return TritonInstall(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    root = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if root is None or not (root / "tritonserver" / "bin" / "tritonserver").is_file():
        raise LauncherError(
            "there is no tritonserver on the PATH and none in this environment; install one with "
            "`pip install --no-deps nvidia-pytriton==0.7.0` (Linux on x86-64), or run in an NGC tritonserver container"
        )
    return _embedded(root)


def _embedded(root: Path) -> TritonInstall:
    triton = root / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        built = sorted((p.name for p in stub.parent.parent.iterdir()), key=lambda v: int(v.partition(".")[2]))
        raise LauncherError(
            f"the tritonserver inside nvidia-pytriton cannot run Python {version}; it can run {', '.join(built)}"
        )
    _check_numpy()
    libraries = root.parent / "nvidia_pytriton.libs"
    return TritonInstall(
        binary=triton / "bin" / "tritonserver",
        backend_files=triton / "backends" / "python",
        stub=stub,
        library_dirs=(libraries, *_libpython_dirs(version)),
    )


def _check_numpy() -> None:
    """The embedded stub is built for numpy 1: with numpy 2 it reads every tensor as its first byte repeated, and
    crashes on the first request."""
    try:
        numpy = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise LauncherError("numpy is not installed; install it with `pip install 'numpy<2'`") from None
    if int(numpy.partition(".")[0]) >= 2:
        raise LauncherError(
            f"the tritonserver inside nvidia-pytriton needs numpy below 2, and this environment has {numpy}; "
            "run `pip install 'numpy<2'`"
        )


def _libpython_dirs(version: str) -> tuple[Path, ...]:
    """Where this Python's shared library is, which the stub links to; empty when the system's loader finds it."""
    name = f"libpython{version}.so.1.0"
    candidates = (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib"))
    for directory in candidates:
        if directory and (Path(directory) / name).is_file():
            return (Path(directory),)
    if ctypes.util.find_library(f"python{version}"):
        return ()
    raise LauncherError(
        f"{name} is missing, which Triton's Python backend needs; install it (Debian, Ubuntu: "
        f"`apt install libpython{version}`) or use a Python built with a shared library"
    )
