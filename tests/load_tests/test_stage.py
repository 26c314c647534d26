"""The stage sends what belongs to the phase that is on, and nothing else."""

from __future__ import annotations

from typing import Any

import gevent

from load_tests.recording import Recorder, Sample
from load_tests.users import Stage
from load_tests.workload import Open, Phase, Shot, every

SHOT = Shot("question", "salt")
PROBE = Open("probe", lambda recorder: every(0.5), iter(()))


class _Player:
    """Answers at once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def play(self, shot: Shot, sample: Sample) -> Sample:
        """See `Player.play`."""
        self._recorder.end(sample, "right")
        return sample


class _Bridge:
    """Nothing to cross."""

    def run(self, result: Any) -> Any:
        """See `Bridge.run`."""
        return result


def make_stage() -> Stage:
    recorder = Recorder()
    return Stage(_Bridge(), _Player(recorder), recorder, "grpc")  # type: ignore[arg-type]


def test_a_shot_of_the_phase_that_is_on_is_sent() -> None:
    stage, phase = make_stage(), Phase("calm", 8.0, (PROBE,))
    stage.begin(phase)
    sample = stage.shoot(phase, "probe", SHOT)
    assert sample is not None
    assert sample.outcome == "right"
    assert stage.recorder.samples == [sample]


def test_a_shot_that_comes_too_late_for_its_phase_is_not_sent() -> None:
    """An arrival at the very end: its greenlet runs when the run has begun to wait for what is in flight."""
    stage, phase = make_stage(), Phase("recovery", 16.0, (PROBE,))
    stage.begin(phase)
    late = gevent.spawn(stage.shoot, phase, "probe", SHOT)
    stage.begin(None)
    assert stage.recorder.in_flight == 0
    late.join()
    assert late.value is None
    assert stage.recorder.samples == []


def test_a_shot_of_one_phase_is_not_sent_in_the_next() -> None:
    stage, calm, flood = make_stage(), Phase("calm", 8.0, (PROBE,)), Phase("overload", 8.0, (PROBE,))
    stage.begin(calm)
    stage.begin(flood)
    assert stage.shoot(calm, "probe", SHOT) is None
    assert stage.shoot(flood, "probe", SHOT) is not None
