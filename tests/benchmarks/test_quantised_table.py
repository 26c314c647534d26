"""What the compiler says of products by quantised weights: those of experts fit every GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.gpu.quantised_table import ALL, MXFP4_EXPERTS
from tests.kernels.compile_only import ROOT
from tests.support.scale import SCALE

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


# Each takes seconds to compile on a fresh machine.
WEIGHTS = ALL if SCALE >= 4 else ("INT4, groups of 128", MXFP4_EXPERTS)


@pytest.mark.slow
@pytest.mark.nightly
def test_products_and_experts_fit_the_architecture_with_the_least_shared_memory() -> None:
    chosen = [argument for weights in WEIGHTS for argument in ("--weights", weights)]
    command = [sys.executable, "-m", "benchmarks.gpu.quantised_table", "--arch", "120", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| sm_120 ")]
    # Products in four tiles and that of `batch_invariant`, two kernels of experts in four, and numbers of a weight.
    of_products, of_experts = 5 * (len(WEIGHTS) - 1), 8 * len(WEIGHTS)
    assert len(rows) == of_products + of_experts + len(WEIGHTS), done.stdout + done.stderr
    assert all(float(row[-2]) <= float(row[-1].rstrip(" |")) for row in rows)
