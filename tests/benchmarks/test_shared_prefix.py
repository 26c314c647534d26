"""The printed bytes are those of the launches that are planned, and the bound is the scheduler's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import shared_prefix
from benchmarks.gpu.shared_prefix import SHAPE, bytes_asked_for, shares
from dflash_kernels.paged_attention_launch import HOPPER, plan_launches


@pytest.mark.parametrize(("num_rows", "num_drafts"), [(4, 15), (64, 15), (8, 3), (64, 0)])
def test_the_prefix_is_read_once_for_each_tile_of_the_launch(num_rows: int, num_drafts: int) -> None:
    queries = np.array([num_rows * (1 + num_drafts)])
    (launch,) = plan_launches(queries, np.array([4096]), SHAPE, False, None, HOPPER, max_overestimate=4096)
    _, after, _ = bytes_asked_for(num_rows, num_drafts, 4096, own=0)
    assert after <= launch.num_tiles * 4096 * 2 * 8 * 128 * 2


def test_what_is_shared_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert not shares(3, 0, 4096)
    assert not shares(64, 0, 500)
    assert shares(4, 0, 512)
    # Two rows with 15 drafts to a tile: from 1,024 positions on half of the KV is more than twice the partial results.
    assert not shares(64, 15, 1024)
    assert shares(64, 15, 1040)
    assert shared_prefix.main() == 0
    assert "| 4096 | 64 | 15 |" in capsys.readouterr().out
