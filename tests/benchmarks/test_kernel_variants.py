"""No request waits for the compiler: what serving can launch is compiled at the start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.gpu.kernel_variants import CASES
from tests.kernels.compile_only import ROOT
from tests.scale import scaled

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")

NUM_WORKLOADS = 80
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_mixed_workloads_add_no_kernel_after_the_start(case: str) -> None:
    """Prompts of one length and of many, and every parameter of sampling."""
    count = scaled(NUM_WORKLOADS // len(CASES), at_least=6)
    command = [sys.executable, "-m", "benchmarks.gpu.kernel_variants", "--workloads", str(count), "--case", case]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case}: " in done.stdout
    assert "\n0 kernels compiled in service\n" in done.stdout
