"""What the compiler says of products by quantised weights: those of experts fit every GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.compile_only import ROOT

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.slow
def test_it_compiles_every_scheme_of_products_and_of_experts() -> None:
    """For the architecture with the least shared memory."""
    command = [sys.executable, "-m", "benchmarks.gpu.quantised_table", "--arch", "120"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| sm_120 ")]
    assert len(rows) == (3 * 5 + 2) * 4, done.stdout + done.stderr
    assert all(float(row[-2]) <= float(row[-1].rstrip(" |")) for row in rows)
