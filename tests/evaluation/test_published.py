"""The tolerance of the published figures, which needs no weights."""

from __future__ import annotations

import pytest

from tests.published import QWEN3_8B_B16, least_acceptance_length


@pytest.mark.parametrize(
    ("dataset", "least"), [("mt-bench", 4.24 * 0.95), ("humaneval", 6.50 * 0.95), ("gsm8k", 6.54 * 0.975 * 0.95)]
)
def test_the_least_acceptance_length_is_95_percent_and_of_gsm8k_97_5_of_that(dataset: str, least: float) -> None:
    assert least_acceptance_length(dataset) == pytest.approx(least)


def test_layers_off_by_one_are_outside_of_the_tolerance() -> None:
    """On MT-Bench the published pair falls to about 3.95 when its layer ids are off by one."""
    assert 3.95 < least_acceptance_length("mt-bench") < QWEN3_8B_B16["mt-bench"]
