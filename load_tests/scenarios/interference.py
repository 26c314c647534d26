"""Running streams with and without a long prompt arriving every second: does a newcomer make the others stutter?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import ClosedLoop, OpenLoop, Options, Phase, Question, Request, every, shared, shuffled_cycle

LONG_PROMPT_TOKENS = 2000
LONG_PROMPTS = 4
STREAM_TOKENS = 400
WARMUP_S = 2.0
LIMIT = 2.0


def questions(options: Options) -> list[Question]:
    """Long answers for the streams, and long prompts with one token of answer."""
    rng = Random(f"interference {options.seed}")
    streams = [
        Question(f"stream-{index}", question.prompt, STREAM_TOKENS, ignore_eos=True)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]
    long_prompts = [
        Question(f"long-{index}", prompts.passage(LONG_PROMPT_TOKENS, rng), max_tokens=1)
        for index in range(LONG_PROMPTS)
    ]
    return streams + long_prompts


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """Half of the time the streams alone, then the same with `rate` long prompts a second, each a miss."""
    streams = [one.id for one in asked if one.id.startswith("stream-")]
    long_prompts = [one.id for one in asked if one.id.startswith("long-")]
    order = shuffled_cycle(streams, Random(f"interference streams {options.seed}"))
    running = ClosedLoop("streams", options.users, shared(map(Request, order)))
    arriving = OpenLoop(
        "long prompts",
        lambda samples: every(1 / options.rate),
        (Request(long_prompts[number % len(long_prompts)], salt=f"new-{number}") for number in itertools.count()),
    )
    half = options.duration_s / 2
    return [
        Phase("alone", half, running, warmup_s=WARMUP_S),
        Phase("with long prompts", half, running, arriving, warmup_s=WARMUP_S),
    ]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, and an inter-token p99 that at most doubles."""
    return [
        *bounds.answers(result),
        bounds.gap_p99(result, "streams", "alone", "with long prompts", LIMIT),
        Bound("long prompts answered", _long(result), "at least", 1),
    ]


def _long(result: RunResult) -> int:
    return sum(s.outcome == "right" for s in result.samples if s.traffic == "long prompts")


SCENARIO = Scenario(
    name="interference",
    summary="16 running streams, first alone and then with a 2,000-token prompt arriving every second",
    shows="long prompts are cut into chunks, so the streams keep their pace",
    defaults=Options(users=16, duration_s=60, prompts=32, rate=1.0),
    settings={"max_num_seqs": "32", "max_model_len": "4096", "kv_cache_gb": "1"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
