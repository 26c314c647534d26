"""What a long request holds of layers with a window, run small."""

import pytest

from benchmarks import window_blocks


def test_it_measures_what_a_request_holds_with_one_table_and_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert window_blocks.main(["--tokens", "700", "--step-tokens", "64"]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("| 700 |"))
    _, before, after, share, blocks = (float(each) for each in row.strip("| ").split(" | "))
    assert before == pytest.approx(700 / 16 * 0.0625, rel=0.02)
    assert after / before == pytest.approx(share, abs=0.01)
    assert share < 0.7
    assert 8 < blocks <= 8 + 64 / 16 + 2
