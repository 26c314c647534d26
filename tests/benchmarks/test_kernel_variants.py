"""No request waits for the compiler: what serving can launch is compiled at the start. And a launch costs the host
little."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.gpu.kernel_variants import CASES
from tests.kernels.compile_only import ROOT
from tests.support.scale import SCALE, by_night, scaled

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")

NUM_WORKLOADS = 3  # of a case; `make nightly` has 200
# Cases that share a process, so that not each of them imports torch and Triton.
CASES_AT_A_TIME = 13
NAMES = [case.name for case in CASES]
if SCALE < 4:  # `make nightly` has all, with more workloads
    NAMES = ["dense, adaptive k"]
GROUPS = [NAMES[start : start + CASES_AT_A_TIME] for start in range(0, len(NAMES), CASES_AT_A_TIME)]
if SCALE < 4:  # what names this file, a known defect for example, looks at these as well
    others = [
        "experts, batch-invariant",
        "DSpark, k = 7",
        "FP8 weights and activations, k = 7",
        "DFlash2, adaptive k",
        "drafter with windows",
    ]
    GROUPS.append(by_night([*others, "gated delta nets, FP8 weights, k = 15"]))
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def test_a_launch_runs_the_kernel_that_triton_would_run() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.launches"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every launch is Triton's" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids="; ".join)
def test_mixed_workloads_add_no_kernel_after_the_start(group: list[str]) -> None:
    """Prompts of one length and of many, and every parameter of sampling."""
    count = len(group) * scaled(NUM_WORKLOADS, at_least=3)
    command = [sys.executable, "-m", "benchmarks.gpu.kernel_variants", "--workloads", str(count)]
    command += [argument for case in group for argument in ("--case", case)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in group:
        assert f"{case}: " in done.stdout
    assert "\n0 kernels compiled in service\n" in done.stdout
