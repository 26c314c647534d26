"""How much of the next product's weight kernels ask for. What comes of it can be seen on a GPU alone."""

from __future__ import annotations

import pytest
import torch

from dflash_kernels import l2_prefetch
from dflash_kernels.l2_prefetch import NOTHING, Prefetch, Reach, prefetch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_prefetch, "has_prefetch", lambda device_type: True)


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        # The weight is 4,096 rows of 8 KiB, 32 MiB.
        (Reach(34 * MIB), Prefetch(132, 4096, 8192, 8192)),
        (Reach(8 * MIB), Prefetch(132, 4096, 8192, 2048)),
        (Reach(8 * MIB, 4), Prefetch(132, 16384, 2048, 512)),
        # Whole lines of the cache, and no fewer than one.
        (Reach(3 * MIB), Prefetch(132, 4096, 8192, 768)),
        (Reach(3 * MIB + 4096 * 100), Prefetch(132, 4096, 8192, 768)),
        (Reach(4096 * 127), NOTHING),
        (Reach(0), NOTHING),
        # No line begins where a third of a row ends.
        (Reach(8 * MIB, 3), NOTHING),
    ],
)
def test_every_row_of_a_weight_is_asked_for_alike(
    reach: Reach, expected: Prefetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(l2_prefetch.REACH, "gate", reach)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert prefetch(weight, 16, "gate") == expected


def test_nothing_is_asked_for_where_it_could_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(l2_prefetch.REACH, "norm", Reach(8 * MIB))
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert prefetch(weight, l2_prefetch.MAX_TOKENS, "norm") != NOTHING
    assert prefetch(weight, l2_prefetch.MAX_TOKENS + 1, "norm") == NOTHING
    assert prefetch(None, 1, "norm") == NOTHING
    assert prefetch(weight.view(64, 64, 4096), 1, "norm") == NOTHING
    monkeypatch.setattr(l2_prefetch, "has_prefetch", lambda device_type: False)
    assert prefetch(weight, 1, "norm") == NOTHING


def test_interpreted_kernels_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not l2_prefetch.has_prefetch("cpu")
    l2_prefetch.has_prefetch.cache_clear()
