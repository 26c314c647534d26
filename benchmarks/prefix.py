"""A long shared prefix: time to first token, acceptance and output of the first request with it against later ones.

`python -m checks.prefix` prints them and holds them to their bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_backend import LLM
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.spec_stats import SpecDecodingStats
from load_tests.prompts import HeldOutPrompt


@dataclass(frozen=True)
class PrefixMeasurement:
    """Times: the least over the prefixes, since what else runs on a machine only adds to one. In seconds; lengths in
    tokens. fewest_cached_tokens: that a hit began behind, which is what makes it one."""

    prefix_tokens: int
    repeats: int
    miss_first_token_s: float
    hit_first_token_s: float
    miss_acceptance_length: float
    hit_acceptance_length: float
    outputs_equal: bool
    fewest_cached_tokens: int

    @property
    def first_token_ratio(self) -> float:
        """Hit over miss."""
        return self.hit_first_token_s / self.miss_first_token_s


def measure_prefix(
    prompts: list[HeldOutPrompt],
    repeats: int = 12,
    prefix_tokens: int = 1500,
    on_prefix: Callable[[int, int], None] = lambda done, total: None,
    num_others: int = 1,
    **settings: Any,
) -> PrefixMeasurement:
    """For each of `repeats` prefixes, ask one question twice: with an empty cache (a miss), and after another question
    has brought the prefix into the cache (a hit on the prefix alone). num_others: how many questions have to, 2 where a
    target's recurrent state is copied once a second prompt leaves the first. settings: of the engine.

    The question is the same, so output and acceptance must be too. `cache_salt` keeps the two apart. A prefix is other
    held-out conversations in a random order, cut to `prefix_tokens`.
    """
    llm = LLM(max_num_seqs=1, adaptive_speculation=False, **settings)
    llm.generate(prompts[0].prompt, max_tokens=8, temperature=0)  # warm-up
    rng = random.Random(0)
    miss: list[RequestOutput] = []
    hit: list[RequestOutput] = []
    cached: list[int] = []

    def ask(prefix: list[int], question: HeldOutPrompt, salt: str) -> RequestOutput:
        ids = prefix + llm.tokenizer.encode(question.prompt)
        return llm.generate([ids], max_tokens=96, temperature=0, cache_salt=salt)[0]

    for repeat in range(repeats):
        history = "".join(prompt.prompt for prompt in rng.sample(prompts, len(prompts)))
        prefix = llm.tokenizer.encode(history)[:prefix_tokens]
        question, *others = rng.sample(prompts, 1 + num_others)
        miss.append(ask(prefix, question, f"miss {repeat}"))
        for other in others:
            ask(prefix, other, f"hit {repeat}")
        before = llm.stats().prefix_cache_hits
        hit.append(ask(prefix, question, f"hit {repeat}"))
        cached.append(llm.stats().prefix_cache_hits - before)
        on_prefix(repeat + 1, repeats)
    return PrefixMeasurement(
        prefix_tokens=prefix_tokens,
        repeats=repeats,
        miss_first_token_s=min(output.first_token_s for output in miss),
        hit_first_token_s=min(output.first_token_s for output in hit),
        miss_acceptance_length=acceptance_length(miss),
        hit_acceptance_length=acceptance_length(hit),
        outputs_equal=[output.token_ids for output in miss] == [output.token_ids for output in hit],
        fewest_cached_tokens=min(cached),
    )


def acceptance_length(outputs: list[RequestOutput]) -> float:
    """Over all requests together."""
    return SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats).acceptance_length
