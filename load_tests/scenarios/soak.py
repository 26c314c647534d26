"""Everything at once for a long time: shared prefixes, fresh prompts, sampled answers, cancellations. Memory must be
flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.scenarios import mixed_lengths
from load_tests.verdict import Bound
from load_tests.workload import Options, Phase, Question, Request, closed_loop, shuffled_cycle

SHARE_ALONE = 0.3
SHARE_CANCELLED = 0.05
ROLES = ("stub", "engine", "server")


def requests(options: Options, asked: Sequence[Question]) -> Iterator[Request]:
    """Most requests share their prompts, some have a new salt, and a few are cancelled after three responses."""
    rng = Random(f"soak {options.seed}")
    for number, question in enumerate(shuffled_cycle([one.id for one in asked], rng)):
        salt = f"alone-{number}" if rng.random() < SHARE_ALONE else ""
        yield Request(question, salt, cancel_after=3 if rng.random() < SHARE_CANCELLED else None)


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    return closed_loop("soak", options, requests(options, asked), warmup_s=2.0)


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, steady acceptance, flat memory."""
    return [
        *bounds.answers(result),
        bounds.acceptance_drift(result),
        *(bounds.flat_memory(result, role) for role in ROLES),
    ]


SCENARIO = Scenario(
    name="soak",
    summary="mixed traffic in a closed loop for half an hour",
    shows="the memory of stub, engine and server stays flat, and so does acceptance",
    defaults=Options(users=32, duration_s=1800, prompts=100),
    settings={"max_num_seqs": "32", "max_model_len": "2048"},
    questions=mixed_lengths.questions,
    phases=phases,
    bounds=verdict,
)
