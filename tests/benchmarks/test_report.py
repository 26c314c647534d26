"""What a benchmark's report says of made-up measurements, and what it takes for a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure import HostShare, Measurement
from benchmarks.prefix import PrefixMeasurement
from benchmarks.report import BASELINE, DFLASH, NO_DRAFT, Runs, misses, ratio_table

PREFIX = PrefixMeasurement(
    prefix_tokens=1500,
    repeats=3,
    miss_first_token_s=0.8,
    hit_first_token_s=0.1,
    miss_acceptance_length=4.0,
    hit_acceptance_length=3.0,
    outputs_equal=True,
    fewest_cached_tokens=1488,
)
OUTPUTS = {0: [1, 2], 1: [3]}


def run(system: str, streams: int, tokens_per_s: float) -> Measurement:
    return Measurement(system, streams, seconds=2.0, num_tokens=int(2 * tokens_per_s), outputs=dict(OUTPUTS))


MEASURED = Runs(
    runs=[run(BASELINE, 1, 10), run(NO_DRAFT, 1, 20), run(DFLASH, 1, 50), run(DFLASH, 8, 120)],
    through_ratio=0.75,
    through_ratios=[0.7, 0.75, 0.8],
    host=HostShare(streams=8, num_steps=100, step_s=0.9, phase_s=0.8, message_s=0.1),
)


def test_each_ratio_is_of_what_its_words_say() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in ratio_table(MEASURED, PREFIX).splitlines()[2:]
    ]
    assert {name: float(value) for name, value in rows} == {
        "DFlash over transformers, 1 stream": 50 / 10,
        "DFlash over k = 0, 1 stream": 50 / 20,
        "DFlash at 8 streams over transformers at 1": 120 / 10,
        "through Triton over in-process, 8 streams, median pair": 0.75,
        "time to first token, hit over miss, prefix of 1500 tokens": 0.1 / 0.8,
        "acceptance length, hit over miss": 3 / 4,
        "host's own share of a step (planning, preparation, applying, messages), 8 streams: 2.00 of 10.00 ms": 0.2,
    }


@pytest.mark.parametrize("bad", [None, 1, 2, 3, "prefix"])
def test_one_output_that_differs_is_a_miss(bad: int | str | None) -> None:
    runs = [replace(each, outputs=OUTPUTS | ({1: [4]} if bad == i else {})) for i, each in enumerate(MEASURED.runs)]
    found = misses(runs, replace(PREFIX, outputs_equal=bad != "prefix"))
    if bad is None:
        assert found == []
    elif bad == "prefix":
        assert found == ["a prefix hit gives another output than a miss"]
    else:
        (miss,) = found
        each = MEASURED.runs[int(bad)]
        assert miss == f"{each.system}, {each.streams} streams: 1 of 2 outputs are equal"
