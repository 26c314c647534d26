"""The benchmarks that promise something notice when it does not hold; and the small ones run as the tests' own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report, scheduler
from benchmarks.measure import Measurement
from benchmarks.prefix import PrefixMeasurement
from checks import acceptance, cancel_cost, malformed, mixed, nightly, prefix
from checks.flooded import FloodedTimes

GOOD_PREFIX = PrefixMeasurement(1500, 8, 0.1, 0.012, 11.5, 11.5, True, 1488)


@pytest.mark.nightly
@pytest.mark.slow
def test_planning_and_lookup_do_not_grow_with_the_cached_blocks() -> None:
    """The benchmark has up to a million blocks, and bounds in seconds as well; at this scale the same growth shows."""
    small, large = (scheduler.measure(num_blocks, steps=500, lookups=25) for num_blocks in (4_000, 32_000))
    bound = 3.0  # a cost in proportion to the blocks would be 8 times as large
    assert large.plan_median_s < bound * small.plan_median_s
    assert large.lookup_s < bound * small.lookup_s
    assert large.apply_median_s < bound * small.apply_median_s


def test_the_scheduler_benchmark_names_each_bound_that_is_missed() -> None:
    good = scheduler.Cost(10_000, 5e-4, 8e-4, 1e-4, 3e-3, 1e-6)
    assert scheduler.misses([good, dataclasses.replace(good, num_blocks=10**6)]) == []
    slow = dataclasses.replace(good, num_blocks=10**6, plan_p99_s=2e-3, lookup_s=6e-3)
    assert len(scheduler.misses([good, slow])) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"outputs_equal": False}, ["another output"]),
        ({"hit_first_token_s": 0.05}, ["first token after 0.500"]),
        ({"hit_acceptance_length": 10.0}, ["acceptance differs by 13.0%"]),
        ({"fewest_cached_tokens": 0}, ["behind 0 of the prefix's 1500 tokens"]),
    ],
)
def test_a_prefix_measurement_names_each_bound_that_is_missed(changes: dict[str, Any], words: list[str]) -> None:
    found = prefix.misses(dataclasses.replace(GOOD_PREFIX, **changes))
    assert len(found) == len(words)
    assert all(word in miss for word, miss in zip(words, found, strict=True))


def test_the_benchmark_exits_with_1_when_an_output_differs() -> None:
    def measured(system: str, outputs: dict[int, list[int]]) -> Measurement:
        fields = {field.name: None for field in dataclasses.fields(Measurement)}
        return Measurement(**fields | {"system": system, "streams": 1, "outputs": outputs})  # type: ignore[arg-type]

    right, wrong = {0: [1, 2], 1: [3]}, {0: [1, 2], 1: [4]}
    runs = [measured(report.BASELINE, right), measured(report.DFLASH, right)]
    assert report.misses(runs, GOOD_PREFIX) == []
    runs.append(measured(report.TRITON, wrong))
    assert report.misses(runs, GOOD_PREFIX) == [f"{report.TRITON}, 1 streams: 1 of 2 outputs are equal"]
    assert len(report.misses(runs, dataclasses.replace(GOOD_PREFIX, outputs_equal=False))) == 2


def evaluation(length: float, last: float, answers: tuple[str, ...] = ("a", "b")) -> Any:
    counts = SimpleNamespace(acceptance_length=length, per_position_rates=(0.9, last))
    results = [SimpleNamespace(answers=[SimpleNamespace(text=text)]) for text in answers]
    return SimpleNamespace(overall=SimpleNamespace(counts=counts), results=results)


def test_acceptance_has_bounds_overall_at_the_last_position_and_for_shifted_layers() -> None:
    found = evaluation(acceptance.ACCEPTANCE_LENGTH, 0.4)
    assert acceptance.misses(found) == []
    assert len(acceptance.misses(evaluation(0.66 * acceptance.ACCEPTANCE_LENGTH, 0.0))) == 2
    assert acceptance.misses_shifted(1, found, evaluation(0.9 * acceptance.ACCEPTANCE_LENGTH, 0.4)) == []
    assert len(acceptance.misses_shifted(1, found, evaluation(acceptance.ACCEPTANCE_LENGTH, 0.4, ("a", "c")))) == 2


def test_asking_about_clients_has_a_bound() -> None:
    assert cancel_cost.misses([(0.01, 0.2), (0.06, 0.3)]) == []
    assert cancel_cost.misses([(0.01, 0.2), (0.31, 0.3)]) == ["63 more requests take 30.0% of a core; at most 10%"]


def test_requests_beside_a_flood_have_a_bound() -> None:
    times = [0.02, 0.03, 0.04]
    assert FloodedTimes(times, [0.08, 0.09, 0.5]).misses() == []
    assert FloodedTimes(times, [0.08, 0.12, 0.5]).misses() == [
        "requests take 4.00 times as long beside the flood; at most 3"
    ]


@pytest.fixture
def sender() -> malformed.Sender:
    """One that checks answers and sends nothing."""
    sender = malformed.Sender.__new__(malformed.Sender)
    sender.report, sender._lock = malformed.Report(), threading.Lock()
    return sender


@pytest.mark.parametrize(
    ("refused", "words", "by_model"),
    [
        (True, "INVALID_ARGUMENT: 'n' is 0; allowed: 1 to 64", 1),
        (True, "[request id: <id_unknown>] unexpected shape for input 'stream' for model 'dflash'. Expected [1]", 0),
    ],
)
def test_a_refusal_with_the_right_status_passes(
    sender: malformed.Sender, refused: bool, words: str, by_model: int
) -> None:
    sender._check("over gRPC", refused, words, "sent")
    assert (sender.report.misses, sender.report.by_model) == ([], by_model)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (True, "INTERNAL: 'n' is 0; allowed: 1 to 64"),
        (True, "UNAVAILABLE: try again"),
        (True, "the model broke"),
        (True, ""),
        (False, "INVALID_ARGUMENT: refused, but answered with 200"),
        (True, 'INVALID_ARGUMENT: Traceback (most recent call last): File "model.py", line 1'),
    ],
)
def test_any_other_answer_to_a_malformed_request_is_a_miss(sender: malformed.Sender, refused: bool, words: str) -> None:
    with pytest.raises(malformed.Miss):
        sender._check("HTTP 400", refused, words, "sent")


def test_every_case_that_is_to_be_dropped_says_when() -> None:
    cases = mixed.draw(50, dropped=20, seed=3)
    assert sum(case.drop_s is not None for case in cases) == 20
    assert json.dumps(cases[0].parameters)
    assert 0.0 < mixed.LEAST_DROPPED <= 1.0


def test_nightly_runs_modules_that_exist() -> None:
    for arguments, _ in nightly.COMMANDS.values():
        assert importlib.util.find_spec(arguments[0]) is not None
