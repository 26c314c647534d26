"""Time to first token and acceptance with a long shared prefix: the first request with a prefix against later ones."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from benchmarks.workload import HeldOutPrompt
from dflash_backend import LLM


@dataclass(frozen=True)
class PrefixMeasurement:
    """Medians over the prefixes. Times in seconds; lengths in tokens."""

    prefix_tokens: int
    repeats: int
    miss_first_token_s: float
    hit_first_token_s: float
    miss_acceptance_length: float
    hit_acceptance_length: float
    outputs_equal: bool

    @property
    def first_token_ratio(self) -> float:
        """Hit over miss."""
        return self.hit_first_token_s / self.miss_first_token_s


def measure_prefix(prompts: list[HeldOutPrompt], repeats: int = 12, prefix_tokens: int = 1500) -> PrefixMeasurement:
    """For each of `repeats` fresh prefixes, ask one question twice: the first time nothing is cached (a miss), the
    second time the prefix is (a hit). The question is the same, so acceptance and output must be the same too.

    Every prefix is other held-out conversations in a random order, cut to `prefix_tokens`.
    """
    llm = LLM(max_num_seqs=1)
    llm.generate(prompts[0].prompt, max_tokens=8, temperature=0)  # warm-up
    rng = random.Random(0)
    miss_times, hit_times = [], []
    accepted, drafts = [0, 0], [0, 0]
    equal = True
    for repeat in range(repeats):
        history = "".join(prompt.prompt for prompt in rng.sample(prompts, len(prompts)))
        prefix = llm.tokenizer.encode(history)[:prefix_tokens]
        question = llm.tokenizer.encode(prompts[repeat % len(prompts)].prompt)
        pair = [llm.generate([prefix + question], max_tokens=96, temperature=0)[0] for _ in range(2)]
        miss_times.append(pair[0].first_token_s)
        hit_times.append(pair[1].first_token_s)
        equal = equal and pair[0].token_ids == pair[1].token_ids
        for kind, output in enumerate(pair):
            assert output.stats is not None
            accepted[kind] += output.stats.num_accepted_tokens
            drafts[kind] += output.stats.num_drafts
    return PrefixMeasurement(
        prefix_tokens=prefix_tokens,
        repeats=repeats,
        miss_first_token_s=statistics.median(miss_times),
        hit_first_token_s=statistics.median(hit_times),
        miss_acceptance_length=1 + accepted[0] / drafts[0],
        hit_acceptance_length=1 + accepted[1] / drafts[1],
        outputs_equal=equal,
    )
