"""What costly requests cost other clients: the verdict, and a client that sends while it is told to."""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from checks.parse_cost import Cost, compute, p99

REFUSED = "INVALID_ARGUMENT: too much"


def test_the_99th_percentile_is_exceeded_by_one_in_a_hundred() -> None:
    times = [float(number) for number in range(200, 0, -1)]
    assert p99(times) == 198.0
    assert p99([0.5]) == 0.5


@pytest.mark.parametrize(
    ("slowest", "words", "miss"), [(0.02, REFUSED, ""), (0.021, REFUSED, "2.10 times"), (0.01, "", "not refused")]
)
def test_a_tail_twice_as_long_and_an_answer_are_misses(slowest: float, words: str, miss: str) -> None:
    """The tail counts, not the median."""
    cost = Cost([0.01] * 100, [0.01] * 98 + [slowest] * 2, 5, words)
    misses = cost.misses()
    assert len(misses) == (miss != "")
    assert all(miss in text for text in misses)
    assert f"{100 * slowest:.2f} times" in str(cost)


def test_a_side_process_works_between_two_commands_and_ends_with_its_pipe() -> None:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=compute, args=(theirs,))
    thread.start()
    for _ in range(2):
        ours.send("begin")
        assert not ours.poll(0.05)
        ours.send("end")
        assert ours.poll(10)
        assert ours.recv() == (0, "")
    ours.close()
    thread.join(10)
    assert not thread.is_alive()
