"""The device's clock: it needs a GPU to run, and compiles for one anywhere (`test_compiles.py`)."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels.timestamp import timestamp


def launches() -> None:
    """For `compile_only`."""
    timestamp(torch.zeros(5, dtype=torch.int64), 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_times_ascend_in_the_order_of_the_launches() -> None:
    marks = torch.zeros(5, dtype=torch.int64, device="cuda")
    for index in range(5):
        timestamp(marks, index)
    times = marks.tolist()
    assert 0 < times[0] <= times[1] <= times[2] <= times[3] <= times[4]
