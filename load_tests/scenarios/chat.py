"""Conversations that grow: every turn's prompt is all that was said before, so a cache saves nearly all of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import ClosedLoop, Options, Phase, Question, Request

TURNS = 6
MAX_TOKENS = 64
FIRST_TURN_TOKENS = 200


def questions(options: Options) -> list[Question]:
    """`prompts` turns in conversations of `TURNS`. Each follows the right answer to the one before."""
    rng = Random(f"chat {options.seed}")
    made = []
    for conversation in range(max(1, options.prompts // TURNS)):
        parent = None
        for number, question in enumerate(prompts.held_out(TURNS, rng)):
            opening = prompts.passage(FIRST_TURN_TOKENS, rng) if parent is None else ""
            name = f"conversation-{conversation}/{number}"
            made.append(Question(name, opening + question.prompt, MAX_TOKENS, parent=parent))
            parent = name
    return made


def conversations(options: Options, asked: Sequence[Question]) -> Callable[[int], Iterator[Request]]:
    """A user goes through one conversation after the other, each under a new salt, so that none of it is cached."""
    by_conversation = [list(turns) for _, turns in itertools.groupby(asked, lambda one: one.id.partition("/")[0])]

    def of_user(user: int) -> Iterator[Request]:
        rng = Random(f"chat user {options.seed} {user}")
        for number in itertools.count():
            for turn in rng.choice(by_conversation):
                yield Request(turn.id, salt=f"user-{user}/{number}")

    return of_user


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    traffic = ClosedLoop("chat", options.users, conversations(options, asked))
    return [Phase("load", options.duration_s, traffic, warmup_s=2.0)]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, steady acceptance and a hit rate near the ideal."""
    return [*bounds.answers(result), bounds.acceptance_drift(result), bounds.hit_rate(result)]


SCENARIO = Scenario(
    name="chat",
    summary="conversations of several turns; each turn repeats the history, in a closed loop",
    shows="answers are cached too, and a growing history costs only what is new of it",
    defaults=Options(users=32, duration_s=120, prompts=192),
    settings={"kv_write_guard": "true", "max_num_seqs": "32", "max_model_len": "2048"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
