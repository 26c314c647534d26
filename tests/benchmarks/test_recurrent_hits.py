"""The comparison of hits with misses of a target with recurrent layers, run small."""

import pytest

from benchmarks import recurrent_hits


def test_it_measures_hits_and_fails_when_they_take_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "200", "--rounds", "1"]
    assert recurrent_hits.main([*small, "--most", "50"]) == 0
    printed = capsys.readouterr().out
    assert "384 of 800 tokens of prompts were cached" in printed
    assert "0 first tokens differ" in printed
    assert recurrent_hits.main([*small, "--most", "0.001"]) == 1
