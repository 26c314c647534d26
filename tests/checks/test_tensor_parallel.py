"""`checks.tensor_parallel` with smaller numbers."""

from __future__ import annotations

import pytest

from checks import tensor_parallel


@pytest.mark.slow
def test_texts_of_two_ranks_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert tensor_parallel.check([2], num_prompts=20, max_tokens=16)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line, name in zip(lines[2:], ("greedy", "sampled"), strict=True):
        words = line.replace(",", "").split()
        assert words[:5] == ["2", name, "20", "of", "20"]
        steps, sums, messages = (float(word) for word in words[7:10])
        # Two sums in each of 8 layers, of 160 numbers for each token.
        assert steps > 0
        assert sums > 16 * 160 * 4 / 1024
        assert 0 < messages < sums
