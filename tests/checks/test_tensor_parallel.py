"""`checks.tensor_parallel` with smaller numbers."""

from __future__ import annotations

import itertools

import pytest

from checks import tensor_parallel


@pytest.mark.nightly
@pytest.mark.slow
def test_texts_of_two_ranks_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert tensor_parallel.check([2], num_prompts=10, max_tokens=16)
    lines = capsys.readouterr().out.splitlines()
    found = list(itertools.product((False, True), ("greedy", "sampled", "filtered")))
    assert len(lines) == 2 + len(found)
    held = []
    for line, (split, name) in zip(lines[2:], found, strict=True):
        words = line.replace(",", "").replace("rank 0", "rank-0").split()
        assert words[:2] == ["2", "split" if split else "rank-0"]
        held.append(float(words[2]))
        assert words[3:7] == [name, "10", "of", "10"]
        steps, sums, messages = (float(word) for word in words[9:12])
        # Two sums in each of 8 layers, of 160 numbers for each token.
        assert steps > 0
        assert sums > 16 * 160 * 4 / 1024
        assert 0 < messages < sums
    assert held[-1] < 0.51 * held[0]
