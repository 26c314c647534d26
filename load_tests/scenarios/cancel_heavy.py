"""Half of all requests are given up midway: their blocks must come back, and nobody else may notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, corpus
from load_tests.result import RunResult
from load_tests.verdict import Bound
from load_tests.workload import Closed, Defaults, Options, Phase, Question, Scenario, Shot, deck, shared

MAX_TOKENS = 160
SYSTEM_PROMPT_TOKENS = 300
CANCELLED_SHARE = 0.5
MAX_RESPONSES = 12


def questions(options: Options) -> list[Question]:
    """Long answers after a system prompt that all share: those who go away hold blocks that others use."""
    rng = Random(f"cancel-heavy {options.seed}")
    system = corpus.passage(SYSTEM_PROMPT_TOKENS, rng)
    return [
        Question(f"cancel-{index}", system + question.prompt, MAX_TOKENS, ignore_eos=True)
        for index, question in enumerate(corpus.held_out(options.prompts, rng))
    ]


def shots(options: Options, asked: Sequence[Question]) -> Iterator[Shot]:
    """Decks of all questions; every other shot, by chance, is cancelled after one to `MAX_RESPONSES` responses."""
    rng = Random(f"cancel-heavy shots {options.seed}")
    for question in deck([one.id for one in asked], rng):
        cancelled = rng.random() < CANCELLED_SHARE
        yield Shot(question, cancel_after=rng.randint(1, MAX_RESPONSES) if cancelled else None)


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    traffic = Closed("cancel-heavy", options.users, shared(shots(options, asked)))
    return [Phase("load", options.duration_s, (traffic,), warmup_s=1.0)]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers also where neighbours go away, and blocks that come back."""
    cancelled = result.count("cancelled")
    return [*bounds.answers(result), Bound("cancelled requests", cancelled, "at least", 1)]


SCENARIO = Scenario(
    name="cancel-heavy",
    summary="half of the streams are cancelled midway, in a closed loop",
    shows="cancelled requests free their blocks, shared ones included, and disturb nobody",
    defaults=Defaults(users=32, duration_s=60, prompts=80),
    settings={"kv_write_guard": "true", "max_num_seqs": "16", "max_model_len": "1024"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
