"""Prompts close to the model's longest, in a pool that holds only some of them: requests wait for blocks, and
eviction goes on all along."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import PREEMPTIONS, RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import Options, Phase, Question, Request, closed_loop, shuffled_cycle

PROMPT_TOKENS = 3000
MAX_TOKENS = 400


def questions(options: Options) -> list[Question]:
    """Long passages of their own, each with a question."""
    rng = Random(f"long-context {options.seed}")
    return [
        Question(f"long-{index}", prompts.passage(PROMPT_TOKENS, rng) + question.prompt, MAX_TOKENS, ignore_eos=True)
        for index, question in enumerate(prompts.held_out(options.prompts, rng))
    ]


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    order = shuffled_cycle([one.id for one in asked], Random(f"long-context requests {options.seed}"))
    return closed_loop("long context", options, map(Request, order), warmup_s=2.0)


def verdict(result: RunResult) -> list[Bound]:
    """Right answers; the number of preemptions is shown. None is asked for: the pool takes five whole requests, and
    admits no sixth that it would have to preempt."""
    seen = [observation.metrics.get(PREEMPTIONS, 0.0) for observation in result.observations]
    preemptions = seen[-1] - seen[0] if seen else None
    return [
        *bounds.answers(result),
        bounds.acceptance_drift(result),
        Bound("preemptions", preemptions, "at least", 0, applies=False, note="shown alone"),
    ]


SCENARIO = Scenario(
    name="long-context",
    summary="prompts of 3,000 tokens in a pool that holds about five of them, in a closed loop",
    shows="eviction changes no answer, and requests that wait for blocks finish too",
    defaults=Options(users=8, duration_s=120, prompts=24),
    settings={"kv_write_guard": "true", "max_num_seqs": "8", "max_model_len": "4096", "kv_cache_gb": "0.092"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
