"""What a split vocabulary costs and saves, run small."""

import pytest

from benchmarks import vocabulary_split


@pytest.mark.nightly
def test_it_prints_what_a_rank_holds_and_what_a_step_sends(capsys: pytest.CaptureFixture[str]) -> None:
    assert vocabulary_split.main(["--vocabularies", "4099", "--rounds", "1", "--tokens", "6"]) == 0
    printed = capsys.readouterr().out
    assert "texts are equal" in printed
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| 4,099 |")]
    assert [row[3] for row in rows] == ["greedy", "sampled", "top-k, top-p", "top-p"]
    kib = {row[3]: [float(each.replace(",", "")) for each in row[4:6]] for row in rows}
    for row in rows:
        assert int(row[2]) * 2 == int(row[1]) == 8
    # Each rank gives its 2,050 logits for each of four rows.
    for before, after in kib.values():
        assert after - before > 4 * 2050 * 4 / 1024 * 0.9
        assert all(float(each) > 0 for each in rows[0][6:])
