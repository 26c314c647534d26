"""Made-up runs for the tests of verdicts and reports: samples and observations as a run would have recorded them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from load_tests.hit_rate import IdealHits
from load_tests.observation import Observation
from load_tests.result import ACCEPTED, DRAFTS, HITS, KV_USAGE, QUERIES, RUNNING, WAITING, PhaseSpan, RunResult
from load_tests.samples import Recorder, Sample
from load_tests.scenario import Run
from load_tests.scenarios import SCENARIOS
from load_tests.workload import Options

DURATION_S = 40.0


def sample(sent_s: float, **changes: Any) -> Sample:
    """A right answer of 20 tokens: first token after 0.1 s, three more responses 0.05 s apart, a hit."""
    made = Sample("load", "traffic", "q", "", True, sent_s, first_s=sent_s + 0.1, ended_s=sent_s + 0.25)
    made.gaps.extend([0.05, 0.05, 0.05])
    made.num_tokens, made.num_prompt_tokens, made.num_cached_tokens = 20, 100, 96
    made.num_drafts, made.num_accepted, made.outcome = 4, 16, "right"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def observation(at_s: float, **changes: Any) -> Observation:
    """A look at a server with 90 % hits, acceptance length 5 and 100 MiB in each process."""
    metrics = {
        QUERIES: 1000 * at_s,
        HITS: 900 * at_s,
        DRAFTS: 100 * at_s,
        ACCEPTED: 400 * at_s,
        RUNNING: 0.0,
        WAITING: 0.0,
        KV_USAGE: 0.0,
    }
    rss = dict.fromkeys(("stub", "engine", "server"), 100 << 20)
    values = {"metrics": metrics, "rss_bytes": rss, "cpu_s": {"engine": at_s}, "own_cpu_s": 0.1 * at_s, **changes}
    return Observation(at_s=at_s, **values)


def finished(scenario: str = "shared-prefix", samples: list[Sample] | None = None, **changes: Any) -> Run:
    """A run of `DURATION_S` with a right answer every 40 ms, unless `samples` says otherwise."""
    recorder = Recorder()
    recorder.samples = [sample(index * 0.04) for index in range(1000)] if samples is None else samples
    for one in recorder.samples:
        recorder.tokens_by_second[int(one.sent_s)] += one.num_tokens
    recorder.lag_by_second = {0: 0.001}
    values: dict[str, Any] = {
        "recorder": recorder,
        "observations": [observation(float(second)) for second in range(int(DURATION_S) + 1)],
        "phases": [PhaseSpan("load", 0.0, DURATION_S)],
        "duration_s": DURATION_S,
        "complete": True,
        "settings": dict(SCENARIOS[scenario].settings),
        "num_kv_blocks": 1000,
        "ideal": IdealHits(1000, 905),
        "ideal_bounded": IdealHits(1000, 905),
    }
    options = Options(users=4, duration_s=DURATION_S, rate=1.0, prompts=8)
    return Run(SCENARIOS[scenario], options, RunResult(**{**values, **changes}), Path())
