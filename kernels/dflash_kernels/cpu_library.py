"""The C++ operations of a CPU (`cpu_ops.cpp`) as a shared library: built once for this machine's processor where a C++
compiler is, tried in a process of its own, and kept for later starts. Without one, torch computes.

`python -m dflash_kernels.cpu_library` builds it, as `make setup` does, and says where it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_ops.cpp")
SWITCH = "DFLASH_CPU_OPS"
"""The environment variable that with `0` leaves all to torch, with `build` has a missing library built first, and with
one of `LEVELS` has one built for that part of what the processor has."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 120
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
# What a processor has, by its name in /proc/cpuinfo, and the compiler's switch for it. `-march=native` would ask the
# processor, which under a hypervisor may have less than it says.
FEATURES = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512dq": "-mavx512dq",
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "amx_int8": "-mamx-int8",
}
LEVELS = {"avx2": ("avx2", "fma", "f16c"), "avx512": tuple(name for name in FEATURES if not name.startswith("amx"))}
"""The features of processors that have less than the newest."""
# A program that loads a library and has it multiply: what the processor lacks ends it by a signal.
TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.dflash_trial())
"""


def processor_switches() -> list[str]:
    """The compiler's switches for this processor; none where the system does not say what it has, or it is no x86."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())
    wanted = LEVELS.get(os.environ.get(SWITCH, ""), tuple(FEATURES))
    return [switch for name, switch in FEATURES.items() if name in flags and name in wanted]


def library_name() -> str:
    """The file name of the library for this source and this processor."""
    text = b"".join(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("cpu_*.h"))))
    text += " ".join([platform.machine(), *FLAGS, *processor_switches()]).encode()
    return f"cpu_ops-{hashlib.sha256(text).hexdigest()[:16]}.so"


def folders() -> list[Path]:
    """Where the library may lie: of this installation, then of this user."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(sys.prefix) / "lib" / "dflash-triton", home / "dflash-triton"]


def find() -> Path | None:
    """The library, where it has been built."""
    name = library_name()
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def find_compiler() -> str | None:
    """A C++ compiler: the one that `CXX` names, or the first that is here."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))), None)


def build() -> Path | None:
    """Build the library into the first folder that can be written to; None where no compiler makes one that works."""
    compiler = find_compiler()
    if compiler is None:
        _log.info(
            "no C++ compiler is here, so torch computes on the CPU, more slowly; install one, such as g++, and run: "
            "%s -m dflash_kernels.cpu_library",
            sys.executable,
        )
        return None
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                made = Path(beside) / "library.so"
                return _kept(folder / library_name(), made) if _compiled(compiler, made) else None
    return None


def _compiled(compiler: str, made: Path) -> bool:
    """Whether `compiler` makes a library that this processor runs."""
    command = [compiler, *FLAGS, *processor_switches(), str(SOURCE), "-o", str(made)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
        subprocess.run(
            [sys.executable, "-c", TRIAL, str(made)], capture_output=True, timeout=BUILD_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        _log.warning("the operations of the CPU cannot be built, so torch computes: %s\n%s", error, said)
        return False
    return True


def _kept(path: Path, made: Path) -> Path:
    os.replace(made, path)
    return path


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library; None where it has not been built, or the environment says so."""
    wanted = os.environ.get(SWITCH)
    if wanted == "0":
        return None
    path = find() or (build() if wanted == "build" or wanted in LEVELS else None)
    if path is None:
        return None
    try:
        return declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        _log.warning("torch computes, since %s cannot be loaded (%s); remove it to have it built again", path, error)
        return None


@functools.cache
def build_for_next_start() -> threading.Thread | None:
    """Begin to build a library that is missing, beside what runs without it; None where there is nothing to do."""
    if load() is not None or os.environ.get(SWITCH) == "0" or find_compiler() is None:
        return None
    _log.info("torch computes; the faster operations of the CPU are built now, for the next start")
    thread = threading.Thread(target=build, name="dflash-cpu-ops", daemon=True)
    thread.start()
    return thread


P, I, L, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float  # noqa: E741
SIGNATURES: dict[str, list[Any]] = {
    "dflash_pack": [I, P, P],
    "dflash_linear": [I, P, L, P, P, P, L],
    "dflash_norm": [I, I, I, P, P, P, P, P, L, L, F],
    "dflash_gate": [I, I, I, P, P, L, L],
    "dflash_rope_write": [I, I, I, I, P, P, F, P, P, P, P, P, P, L, L, L, L],
    "dflash_context_write": [I, I, I, I, P, P, F, P, P, P, P, L, L, L, L],
    "dflash_linear_rope_write": [I, I, I, P, L, P, P, P, F, P, P, P, P, P, P, L, L, L, L],
    "dflash_linear_norm": [I, I, P, L, P, P, P, P, P, P, L, F],
    "dflash_gated_mlp": [I, I, P, L, P, P, P, P, P, L],
    "dflash_choose": [I, I, P, L, L, L, P, P, P, P, P, P],
    "dflash_lowest_kept": [I, I, P, L, L, L, P, P, P, P, P],
    "dflash_penalise": [I, P, P],
    "dflash_ranked_logprobs": [I, I, P, L, L, L, P, L, L, P],
    "dflash_log_odds": [I, I, P, L, L, L, P, F, P],
    "dflash_accept": [P, P, L, P, L, P],
    "dflash_prepare_draft": [P, P, P, L, L, L, L, P, P, P],
    "dflash_store_drafts": [P, P, P, L, P, P, L, P, L],
    "dflash_attend": [I, I, I, P, P, P, P, P, L, P, P, P, L, L, L, L, L, I, L, P, F],
}

# Those that return a number.
NUMBERS: dict[str, list[Any]] = {
    "dflash_packed_bytes": [L, L, L],
    "dflash_pack_blocks": [I, P, I, P, L, L],
    "dflash_are_halves": [I, P, L],
    "dflash_unpack_rows": [I, P, P, L, P],
    "dflash_layers": [I, P, P, P],
    "dflash_lay_out": [P, P, L, L, L, P, P],
    "dflash_take_context": [P, L, P, P, L, L, P, P, P, P, L],
    "dflash_likeliest": [I, P, L, P, P, P, L, P],
    "dflash_coarse_rows_at_most": [L],
    "dflash_has_pairs": [],
}


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    for name, types in NUMBERS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, L
    return library


def main() -> int:
    """The command: where the library is, or that there is none."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = find() or build()
    print(f"operations of the CPU: {path}" if path else "operations of the CPU: torch's own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
