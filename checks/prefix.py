"""Time to first token and acceptance with a long shared prefix: the first request with it against later ones.

`python -m checks.prefix` prints them, and exits with 1 when a bound below is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.progress import progress
from benchmarks.workload import HeldOutPrompt, load_prompts
from dflash_backend import LLM
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_cli.commands.arguments import positive_int

# What the project promises of a hit: its time to first token over a miss's, and how far acceptance may differ.
MAX_FIRST_TOKEN_RATIO = 0.2
MAX_ACCEPTANCE_DIFFERENCE = 0.02
# Of the prefix, that a hit must begin behind: all but the last block, which the question may share.
MIN_HIT_SHARE = 0.95


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

    @property
    def misses(self) -> list[str]:
        """What does not keep its bound, in words."""
        found = [] if self.outputs_equal else ["a hit gives another output than a miss"]
        if self.fewest_cached_tokens < MIN_HIT_SHARE * self.prefix_tokens:
            found.append(f"a hit began behind {self.fewest_cached_tokens} of the prefix's {self.prefix_tokens} tokens")
        if self.first_token_ratio > MAX_FIRST_TOKEN_RATIO:
            found.append(
                f"first token after {self.first_token_ratio:.3f} of a miss's time; at most {MAX_FIRST_TOKEN_RATIO}"
            )
        difference = abs(self.hit_acceptance_length / self.miss_acceptance_length - 1)
        if difference > MAX_ACCEPTANCE_DIFFERENCE:
            found.append(f"acceptance differs by {difference:.1%}; at most {MAX_ACCEPTANCE_DIFFERENCE:.0%}")
        return found


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


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixes", type=positive_int, default=12, help="how many (%(default)s)")
    parser.add_argument("--prefix-tokens", type=positive_int, default=1500, help="tokens of each (%(default)s)")
    given = parser.parse_args()
    result = measure_prefix(load_prompts(60), given.prefixes, given.prefix_tokens, progress("prefixes").step)
    acceptance = result.hit_acceptance_length / result.miss_acceptance_length
    print(
        f"prefix of {result.prefix_tokens} tokens, {result.repeats} times: first token after "
        f"{result.miss_first_token_s * 1e3:.1f} ms on a miss, {result.hit_first_token_s * 1e3:.1f} ms on a hit, ratio "
        f"{result.first_token_ratio:.3f}; acceptance length {result.miss_acceptance_length:.2f} on a miss, "
        f"{result.hit_acceptance_length:.2f} on a hit, ratio {acceptance:.3f}; outputs equal: {result.outputs_equal}"
    )
    print("\n".join(result.misses) or "every bound holds")
    return int(bool(result.misses))


if __name__ == "__main__":
    sys.exit(main())
