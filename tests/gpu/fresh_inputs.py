"""A pytest plugin for `make test-gpu`: kernel tests get fresh random inputs in every run.

The tests of `tests/kernels` fix their seeds, so that a failure comes again. With `-p tests.gpu.fresh_inputs` a number
is added to the seed of every `torch.Generator` they make: that of `KERNEL_SEED`, or one drawn from the time. It stands
in the report's header; `KERNEL_SEED=... make test-gpu` repeats a run, 0 is the tests' own.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

VARIABLE = "KERNEL_SEED"
BASE_SEED = int(os.environ.get(VARIABLE) or time.time_ns() % 1_000_000_007)
# Workers of pytest-xdist start after this process has loaded the plugin, and take its seed.
os.environ[VARIABLE] = str(BASE_SEED)


class FreshGenerator(torch.Generator):
    """A generator whose seeds are shifted by the run's."""

    def manual_seed(self, seed: int) -> torch.Generator:
        """Shifts the seed, as `torch.Generator.manual_seed` otherwise."""
        return super().manual_seed((seed + BASE_SEED) % 2**63)


def pytest_report_header() -> str:
    """So that a run can be repeated."""
    return f"fresh inputs: {VARIABLE}={BASE_SEED}"


@pytest.fixture(autouse=True)
def fresh_generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel tests make their inputs from shifted seeds."""
    if "kernels" in request.path.parts:
        monkeypatch.setattr(torch, "Generator", FreshGenerator)
