"""KV in FP8 costs the demo pair no acceptance and gives the blocks that the arithmetic says."""

from __future__ import annotations

import pytest

from checks.kv_cache import blocks, lossless, quality
from tests.support.scale import scaled


def test_the_pool_has_as_many_blocks_as_the_bytes_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert not blocks()
    assert "five layers, bfloat16: 1.740 times the blocks" in capsys.readouterr().out


def test_drafts_change_no_text_of_the_demo_pair() -> None:
    assert not lossless(scaled(8), 32)


@pytest.mark.slow
def test_acceptance_and_text_of_the_demo_pair_stay() -> None:
    plain, own, missed = quality(scaled(12))
    assert not missed
    assert own.overall.counts.num_drafts > 0
    assert plain.overall.counts != own.overall.counts, "the two ran the same KV"
