"""Half of all requests are given up midway: their blocks must come back, and the other clients may not notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import Options, Phase, Question, Request, closed_loop, shuffled_cycle

MAX_TOKENS = 160
SYSTEM_PROMPT_TOKENS = 300
CANCELLED_SHARE = 0.5
MAX_RESPONSES = 12


def questions(options: Options) -> list[Question]:
    """Long answers after a system prompt that all share: those who go away hold blocks that others use."""
    rng = Random(f"cancel-heavy {options.seed}")
    system = prompts.passage(SYSTEM_PROMPT_TOKENS, rng)
    return [
        Question(f"cancel-{index}", system + question.prompt, MAX_TOKENS, ignore_eos=True)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]


def requests(options: Options, asked: Sequence[Question]) -> Iterator[Request]:
    """Every other request, by chance, is cancelled after one to `MAX_RESPONSES` responses."""
    rng = Random(f"cancel-heavy requests {options.seed}")
    for question in shuffled_cycle([one.id for one in asked], rng):
        cancelled = rng.random() < CANCELLED_SHARE
        yield Request(question, cancel_after=rng.randint(1, MAX_RESPONSES) if cancelled else None)


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    return closed_loop("cancel-heavy", options, requests(options, asked), warmup_s=1.0)


def verdict(result: RunResult) -> list[Bound]:
    """Right answers also where neighbours go away, and blocks that come back."""
    cancelled = result.count("cancelled")
    return [*bounds.answers(result), Bound("cancelled requests", cancelled, "at least", 1)]


SCENARIO = Scenario(
    name="cancel-heavy",
    summary="half of the streams are cancelled midway, in a closed loop",
    shows="cancelled requests free their blocks, shared ones included, and disturb nobody",
    defaults=Options(users=32, duration_s=60, prompts=80),
    settings={"kv_write_guard": "true", "max_num_seqs": "16", "max_model_len": "1024"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
