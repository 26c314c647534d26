"""pytest in a copy of the source, each run a process of its own, forked from one that has imported what takes long
(`preloaded`): five seconds, where most tests of a mutant take less than one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What the path of a copy has in front.
PARTS = (".", "kernels", "client", "cli", "frontend")
OWN_PACKAGES = {"tests", "dflash_backend", "dflash_kernels", "dflash_client", "dflash_cli", "dflash_openai"}
OWN_PACKAGES |= {"benchmarks", "checks", "demo", "load_tests"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.mutations.preloaded"])


def run_pytest(folder: Path, arguments: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """pytest's exit status in `folder`, below 0 when a signal ended it, None when it took too long; and what it
    printed. What pytest found stands, however its process ends then: libraries are taken down behind it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
    with tempfile.TemporaryDirectory(prefix="dflash-pytest-") as name:
        output = Path(name, "output")
        process = _context.Process(target=_in_child, args=(str(folder), list(arguments), str(output)))
        process.start()
        process.join(timeout_s)
        status = process.exitcode
        if status is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        elif (found := Path(f"{output}.status")).exists():
            status = int(found.read_text())
        return status, output.read_text(errors="replace")


def _in_child(folder: str, arguments: list[str], output: str) -> None:
    os.setsid()  # so that what a test starts can be ended with it
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    parts = [str(Path(folder, part)) for part in PARTS]
    sys.path[:0] = parts
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]:
        del sys.modules[name]
    # Bytecode is matched to its source by time and size, which two mutants of one file may share.
    sys.dont_write_bytecode = True
    # A process of its own, also when a worker of pytest-xdist starts it.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": os.pathsep.join(parts), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

    import pytest

    status = int(pytest.main(arguments))
    Path(f"{output}.status").write_text(str(status))
    sys.exit(status)
