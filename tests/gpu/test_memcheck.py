"""The kernels that write KV, on padding, argmax, on ragged tiles, and attention, at borders and without masks, read and
write nothing outside of their tensors, and no two threads of a program meet at one place of its memory, says NVIDIA's
compute-sanitizer. It slows the others down too much to run them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One allocation a tensor, so that what lies behind it is not another tensor of the caching allocator.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TESTS = {
    "memcheck": "padding_tokens_write_nothing or argmax_equals_its_reference or contexts_that_end_at "
    "or read_what_is_the_rows_alone",
    "racecheck": "contexts_that_end_at or read_what_is_the_rows_alone",
}
ERRORS_FOUND = 9


def sanitizer() -> str:
    """The binary; skips where there is none, or where it cannot work on this machine's driver."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not on this machine")
    tried = check(found, "memcheck", ["-c", "import torch; print(torch.ones(3, device='cuda').sum().item())"])
    if tried.returncode != 0:
        pytest.skip(f"compute-sanitizer does not work here: {(tried.stdout + tried.stderr).strip()[-200:]}")
    return found


def check(binary: str, tool: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [binary, "--tool", tool, f"--error-exitcode={ERRORS_FOUND}", sys.executable, *arguments]
    environ = os.environ | ENVIRONMENT
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=420, check=False)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", TESTS)
def test_kernels_stay_within_their_tensors_and_do_not_race(tool: str) -> None:
    binary = sanitizer()
    selected = ["tests/kernels", "-k", TESTS[tool]]
    done = check(binary, tool, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *selected])
    print(done.stdout[-2000:])
    assert " passed" in done.stdout
    assert done.returncode == 0, done.stdout[-4000:]
