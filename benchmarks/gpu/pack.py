"""`make gpu-pack`: what travels to a GPU machine that has no package index, so that it need not compile for minutes.

    python -m benchmarks.gpu.pack [--python PYTHON] [--arch 90] [--only start] [--cache DIR]

runs the parts of `make gpu-report` over a GPU that is not there (`fake_device`), which compiles their kernels for this
compute capability, and packs Triton's cache beside the packages of `make gpu-packages`. A kernel that is compiled is
found again by its text and the line that it begins at, by its constants and by Triton's own files. So `--python` names
an interpreter of the version that the GPU machine has, with the Triton that it has; any torch will do. All of it takes
half an hour of two cores; with `--cache` what an earlier call compiled into that folder is not compiled again. `make
gpu-report` unpacks it and says how many kernels it compiled all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.gpu.card_tests import GPU_TESTS, TEST_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER, KERNELS, MANIFEST = ".gpu-packages", "kernels.tar.xz", "pack.json"
UNPACKED = "dflash-triton-kernels"
ARCH_VARIABLE = "GPU_PACK_ARCH"
# Of what may travel, packages and kernels together.
MOST_BYTES = 60 << 20
# The parts whose kernels are compiled, the longest first; others launch no others.
PARTS = (
    "tests", "start", "texts fp8 both", "texts fp8", "texts bf16", "texts default", "texts drafts", "texts invariant",
    "traffic", "prompts", "engine", "quantised", "candidates", "quantised cycles", "kernels", "ceilings",
    "environment",
)  # fmt: skip
# A part that takes longer than this has met something that does not end.
PART_S = 1800.0
STUB = "libcuda.so.1"


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
    where there are none. Kernels of another pack, from an earlier call, are replaced."""
    packed = root / FOLDER / KERNELS
    if not packed.is_file():
        return {}
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    cache = where / f"{UNPACKED}-{digest[:12]}"
    if not (cache / MANIFEST).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as archive:
            # Last in it is the manifest: where it is, everything is.
            archive.extractall(cache, filter="data")
        point_to(cache)
    return {"TRITON_CACHE_DIR": str(cache)}


def point_to(cache: Path) -> None:
    """Let the entries of a cache name the files where they lie: Triton writes whole paths into it."""
    for group in cache.glob("*/__grp__*.json"):
        names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        paths = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")


def pack(cache: Path, target: Path, manifest: Mapping[str, object]) -> None:
    """Put a cache of Triton's and what is said of it into one file."""
    (cache / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz") as archive:
        # What is alike lies side by side, which makes a pack three times as small.
        for path in sorted(cache.glob("*/*"), key=lambda path: (path.suffix, path.name, path.stat().st_size)):
            # Locks, files that were being written, and text that was compiled, which Triton does without.
            if path.is_file() and path.name != "lock" and path.suffix != ".source":
                archive.add(path, str(path.relative_to(cache)))
        archive.add(cache / MANIFEST, MANIFEST)


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def command(python: str, part: str, records: Path) -> list[str]:
    """What compiles the kernels of a part."""
    if part == "tests":
        plugins = ["-p", "tests.gpu.compiling", "-p", "no:cacheprovider"]
        return [python, "-m", "pytest", "-q", *plugins, "--tb=no", *TEST_OPTIONS, *GPU_TESTS]
    options = ["--shape", "qwen3-8b", "--device", "cuda", "--records", str(records), "--seconds", str(PART_S)]
    return [
        python,
        "-m",
        "benchmarks.gpu.card_parts",
        part,
        *options,
        "--acceptance-length",
        "6.5",
        "--fake",
        "compile",
    ]


def compile_part(part: str, python: str, environ: Mapping[str, str], directory: Path) -> str:
    """Compile the kernels of a part; what its log ends with where it fails, as tests do whose kernels did not run."""
    records = directory / f"{part.replace(' ', '_')}.jsonl"
    # Floors that mean nothing: the parts want some.
    ceilings = {"kind": "ceilings", "copy_bandwidth": 1e12, "matrix_rate": 1e15}
    records.write_text(json.dumps(ceilings) + "\n", encoding="utf-8")
    started = time.monotonic()
    try:
        done = subprocess.run(command(python, part, records), cwd=ROOT, env=dict(environ), capture_output=True,
                              text=True, timeout=PART_S, check=False)  # fmt: skip
        ended = f"status {done.returncode}"
        if done.returncode:
            ended += ": " + " / ".join((done.stdout + done.stderr).strip().splitlines()[-2:])[:300]
    except subprocess.TimeoutExpired:
        ended = f"ended after {PART_S:.0f} s"
    compiled = num_kernels(Path(environ["TRITON_CACHE_DIR"]))
    print(f"{part}: {time.monotonic() - started:.0f} s, {ended}; {compiled} kernels so far", flush=True)
    return ended


def make_stub(directory: Path) -> None:
    """An empty library in place of the driver's, for the linker: Triton's modules that launch kernels name it."""
    source = directory / "empty.c"
    source.write_text("void nothing(void) {}\n", encoding="utf-8")
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{STUB}", "-o", str(directory / STUB), str(source)]
    subprocess.run([os.environ.get("CC", "cc"), *shared], check=True)


def versions_of(python: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Triton's version and `kernel_key`, as another interpreter has them."""
    program = "import json, triton, benchmarks.gpu.pack as p; print(json.dumps([triton.__version__, p.kernel_key()]))"
    found = subprocess.run([python, "-c", program], cwd=ROOT, env=dict(environ), capture_output=True, text=True,
                           check=True)  # fmt: skip
    version, key = json.loads(found.stdout)
    return {"triton": version, "key": key}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 where the pack is larger than what may travel, or has no kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the GPU machine's version, with its Triton")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, ten times (%(default)s)")
    parser.add_argument("--only", action="append", choices=PARTS, help="default: all; again for more")
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--cache", type=Path, help="a folder of compiled kernels, which is kept for the next call")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cache = (args.cache or directory / "cache").resolve()
        cache.mkdir(parents=True, exist_ok=True)
        make_stub(directory)
        folders = [str(ROOT / each) for each in (".", "kernels", "client", "cli", "frontend")]
        environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
            "PYTHONPATH": os.pathsep.join(folders), "TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1",
            "TRITON_LIBCUDA_PATH": str(directory), ARCH_VARIABLE: str(args.arch), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        about = versions_of(args.python, environ)
        print(f"Triton {about['triton']}, compute capability {args.arch / 10:.1f}", flush=True)
        with ThreadPoolExecutor(args.jobs) as jobs:
            one = partial(compile_part, python=args.python, environ=environ, directory=directory)
            list(jobs.map(one, args.only or PARTS))
        count = num_kernels(cache)
        pack(cache, args.out / KERNELS, about | {"arch": args.arch, "kernels": count})
    kernels, whole = (args.out / KERNELS).stat().st_size, size_of(args.out)
    print(f"{args.out}: {whole / 2**20:.1f} MiB, {count} kernels in {kernels / 2**20:.1f} MiB of it")
    if whole > MOST_BYTES:
        print(f"that is more than the {MOST_BYTES >> 20} MiB that may travel", file=sys.stderr)
    return int(whole > MOST_BYTES or count == 0)


if __name__ == "__main__":
    sys.exit(main())
