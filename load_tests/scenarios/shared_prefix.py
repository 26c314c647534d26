"""Tenants with long system prompts in common: what a prefix cache is for.

Every tenant has the same system prompts under a salt of its own. A tenant changes its salt after a number of uses,
which makes the same prompt a miss: so the run has misses from its beginning to its end, with known right answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import ClosedLoop, Options, Phase, Question, Request, shared, shuffled_cycle

TENANTS = 4
SYSTEM_PROMPTS = 4
SYSTEM_PROMPT_TOKENS = 2000
USES_OF_A_SALT = 200
MAX_TOKENS = 64
# One question in this many is sampled, with a seed.
SAMPLED = 8
# A few users first: all at once would ask for every prefix several times before it is in the cache, which is how a
# server starts, and not what this measures.
RAMP_USERS, RAMP_SHARE, RAMP_S = 4, 0.25, 30.0
WARMUP_S = 5.0


def questions(options: Options) -> list[Question]:
    """System prompts times questions, the same for every tenant."""
    rng = Random(f"shared-prefix {options.seed}")
    asked = prompts.held_out(max(1, options.prompts // SYSTEM_PROMPTS), rng)
    systems = [prompts.passage(SYSTEM_PROMPT_TOKENS, rng) for _ in range(SYSTEM_PROMPTS)]
    made = []
    for number, system in enumerate(systems):
        for index, question in enumerate(asked):
            sampled = index % SAMPLED == SAMPLED - 1
            made.append(
                Question(
                    id=f"system-{number}/{index}",
                    text=system + question.prompt,
                    max_tokens=MAX_TOKENS,
                    temperature=1.0 if sampled else 0.0,
                    seed=index if sampled else None,
                )
            )
    return made


def requests(options: Options, asked: Sequence[Question]) -> Iterator[Request]:
    """Each tenant asks each question in turn; a salt lasts for `USES_OF_A_SALT` uses of one tenant's system prompt."""
    rng = Random(f"shared-prefix requests {options.seed}")
    uses: Counter[tuple[str, str]] = Counter()
    pairs = [f"{tenant}|{question.id}" for tenant in range(TENANTS) for question in asked]
    for pair in shuffled_cycle(pairs, rng):
        tenant, _, question = pair.partition("|")
        system = question.partition("/")[0]
        # So that the salts of a tenant's system prompts do not all end at the same time.
        offset = (int(tenant) * SYSTEM_PROMPTS + int(system.removeprefix("system-"))) * USES_OF_A_SALT
        number = (uses[tenant, system] + offset // (TENANTS * SYSTEM_PROMPTS)) // USES_OF_A_SALT
        uses[tenant, system] += 1
        yield Request(question, salt=f"tenant-{tenant}/{system}/{number}")


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """A closed loop, with a few users first."""
    made = shared(requests(options, asked))
    ramp_s = min(options.duration_s * RAMP_SHARE, RAMP_S)
    few = ClosedLoop("first use", min(RAMP_USERS, options.users), made)
    everybody = ClosedLoop("shared prefix", options.users, made)
    load_s = options.duration_s - ramp_s
    return [Phase("ramp", ramp_s, few), Phase("load", load_s, everybody, warmup_s=min(WARMUP_S, load_s / 4))]


def verdict(result: RunResult) -> list[Bound]:
    """Right answers, steady acceptance, a hit rate near the ideal, and hits that answer sooner."""
    return [
        *bounds.answers(result),
        bounds.acceptance_drift(result),
        bounds.hit_rate(result),
        bounds.hit_ttft(result),
    ]


SCENARIO = Scenario(
    name="shared-prefix",
    summary="tenants that share long system prompts, in a closed loop; new salts bring misses all along",
    shows="prefix hits keep answers and acceptance as they are, come as often as they can, and save the prefill",
    defaults=Options(users=64, duration_s=600, prompts=128),
    settings={
        "kv_write_guard": "true",
        "max_num_seqs": "64",
        "max_model_len": "2560",
        # With 64 streams on a CPU the device is full: few drafts a step, and short chunks, so that newcomers who hit
        # the cache do not wait for long steps.
        "num_speculative_tokens": "3",
        "max_prefill_tokens_per_step": "256",
    },
    questions=questions,
    phases=phases,
    bounds=verdict,
    compare_at_least={"enable_prefix_caching=false": 2.0},
)
