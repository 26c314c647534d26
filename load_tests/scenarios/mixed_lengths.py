"""Short and long prompts with short and long answers side by side: chunks and decode rows in every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from load_tests import bounds, prompts
from load_tests.result import RunResult
from load_tests.scenario import Scenario
from load_tests.verdict import Bound
from load_tests.workload import Options, Phase, Question, Request, closed_loop, shuffled_cycle

PROMPT_TOKENS = (0, 60, 250, 700, 1600)
OUTPUT_TOKENS = (4, 24, 96, 256)
SAMPLED = 5


def questions(options: Options) -> list[Question]:
    """Every length of prompt with every length of answer, in turn; one in five is sampled."""
    rng = Random(f"mixed-lengths {options.seed}")
    made = []
    for index, question in enumerate(prompts.held_out(options.prompts, rng)):
        prompt_tokens = PROMPT_TOKENS[index % len(PROMPT_TOKENS)]
        output_tokens = OUTPUT_TOKENS[index // len(PROMPT_TOKENS) % len(OUTPUT_TOKENS)]
        sampled = rng.randrange(SAMPLED) == 0
        made.append(
            Question(
                id=f"mixed-{index}",
                text=prompts.passage(prompt_tokens, rng) + question.prompt,
                max_tokens=output_tokens,
                ignore_eos=output_tokens > 100,
                temperature=1.0 if sampled else 0.0,
                seed=index if sampled else None,
            )
        )
    return made


def requests(options: Options, asked: Sequence[Question]) -> Iterator[Request]:
    """Half of the requests are under a salt of their own."""
    rng = Random(f"mixed-lengths requests {options.seed}")
    for number, question in enumerate(shuffled_cycle([one.id for one in asked], rng)):
        yield Request(question, salt=f"alone-{number}" if rng.random() < 0.5 else "")


def phases(options: Options, asked: Sequence[Question]) -> list[Phase]:
    """One closed loop."""
    return closed_loop("mixed lengths", options, requests(options, asked), warmup_s=2.0)


def verdict(result: RunResult) -> list[Bound]:
    """Right answers and steady acceptance."""
    return [*bounds.answers(result), bounds.acceptance_drift(result)]


SCENARIO = Scenario(
    name="mixed-lengths",
    summary="prompts of 20 to 1,700 tokens with answers of 4 to 256, in a closed loop",
    shows="chunked prefill beside decode rows changes no answer and no acceptance",
    defaults=Options(users=32, duration_s=120, prompts=100),
    settings={"kv_write_guard": "true", "max_num_seqs": "32", "max_model_len": "2048"},
    questions=questions,
    phases=phases,
    bounds=verdict,
)
