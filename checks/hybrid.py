"""A trained hybrid pair: greedy text is that of `transformers`, sampled text that of the target alone, and hits on a
long prefix cost no acceptance.

`make demo-model HYBRID=1` trains such a pair; then `python -m checks.hybrid --pair demo/pair-hybrid`. Exits with 1 when
a text differs (sampled text may part at a tie, as in `checks.sampled_text`), when hits differ with and without the
drafter, or when a hit takes more than a quarter of a miss or loses more than 2 % of its acceptance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.prefix import measure_prefix
from checks.lossless import Case, reference, run_case
from checks.prefix import MIN_HIT_SHARE
from checks.sampled_text import Way, answers, partings, requests, target_alone
from dflash_backend import LLM
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.worker.kv_cache import bytes_per_block
from dflash_backend.worker.memory import GIB
from load_tests.prompts import load_prompts

SMALL_POOL_BLOCKS = 48
# Of more blocks than the prompts of a check fill: one of the default size, for one request, gives some away.
LARGE_POOL_BLOCKS = 4096
# Prompts of one question are too short for a copy of their state.
QUESTIONS_IN_A_PROMPT = 4
MAX_FIRST_TOKEN_RATIO, MAX_ACCEPTANCE_DIFFERENCE = 0.25, 0.02
STREAMS = 32


class HybridPair:
    """The pair, and settings that name it."""

    def __init__(self, directory: Path) -> None:
        self.target = directory / "target"
        self.models: dict[str, Any] = {"target": str(self.target), "draft": str(directory / "draft")}
        config = EngineConfig.from_values({f"{name}_model": path for name, path in self.models.items()})
        pair = resolve_pair(config)
        assert pair.draft_model is not None
        size = bytes_per_block(pair.target.decoder, pair.draft_model.decoder, config.kv_block_size, torch.float32)
        self.small, self.large = (
            {"kv_cache_gb": (num_blocks + 0.5) * size / GIB} for num_blocks in (SMALL_POOL_BLOCKS, LARGE_POOL_BLOCKS)
        )

    def greedy(self, count: int, max_tokens: int) -> int:
        """Print how many texts are those of `transformers` in each case; returns how many are not."""
        tokenizer = LLM(**self.models | {"draft": ""}).tokenizer
        prompts = [tokenizer.encode(row.prompt) for row in load_prompts(count)]
        expected = reference(prompts, max_tokens, target=self.target)
        cases: dict[str, tuple[int, dict[str, Any]]] = {
            "one stream": (1, {}),
            "32 streams": (STREAMS, {}),
            "small KV pool": (STREAMS, self.small),
            "small KV pool, four copies of states": (STREAMS, self.small | {"num_state_snapshots": 4}),
            "chunks of 64 tokens": (STREAMS, {"max_num_batched_tokens": 64}),
            "no prefix cache": (STREAMS, {"enable_prefix_caching": False}),
            "no drafter": (STREAMS, {"draft": ""}),
            "as many drafts as pay": (STREAMS, self.small | {"adaptive_speculation": True}),
        }
        num_wrong = 0
        for name, (streams, settings) in cases.items():
            result = run_case(Case(name, streams, self.models | settings), prompts, expected, max_tokens)
            num_wrong += result.num_prompts - result.num_equal
            print(
                f"greedy, {name}: {result.num_equal} of {result.num_prompts} equal, {result.num_preemptions} "
                f"preemptions, {result.num_cached_tokens} cached tokens, acceptance length "
                f"{result.acceptance_length or 1:.2f}",
                flush=True,
            )
        return num_wrong

    def sampled(self, count: int, max_tokens: int) -> int:
        """Print how many sampled texts are those of the target alone; returns how many part at no tie."""
        asked = requests(count, (1, 2), max_tokens)
        expected = target_alone(asked, self.target)
        ways: dict[str, dict[str, Any]] = {"32 streams": {}, "small KV pool": self.small}
        num_wrong = 0
        for name, settings in ways.items():
            tokens, llm = answers(Way(name, self.models | settings, times=2), asked)
            parted = partings(asked, expected, tokens, self.target)
            num_wrong += sum(not each.is_tie for each in parted)
            stats = llm.stats()
            print(
                f"sampled, {name}, twice: {len(asked) - len(parted)} of {len(asked)} equal, "
                f"{sum(each.is_tie for each in parted)} part at a tie, {stats.num_preemptions} preemptions, "
                f"{stats.prefix_cache_hits} cached tokens",
                flush=True,
            )
        return num_wrong

    def hits(self, count: int) -> int:
        """Print cached tokens with and without the drafter, of prompts that are asked twice; returns whether they
        differ."""
        found = []
        rows = load_prompts(count * QUESTIONS_IN_A_PROMPT)
        texts = ["".join(row.prompt for row in rows[start::count]) for start in range(count)]
        own = self.models | self.large | {"max_num_seqs": 1, "num_state_snapshots": 2 * count}
        for draft in (self.models["draft"], ""):
            llm = LLM(**own | {"draft": draft})
            for _ in range(2):
                for text in texts:
                    llm.generate([text], max_tokens=4, temperature=0)
            found.append(llm.stats().prefix_cache_hits)
        print(f"cached tokens: {found[0]} with the drafter, {found[1]} without", flush=True)
        return int(found[0] != found[1] or not found[0])

    def prefix(self, repeats: int, prefix_tokens: int) -> int:
        """Print what a hit on a long prefix takes and what it drafts; returns how many bounds are missed. The prefix is
        cut to whole blocks: the copy that a hit starts from lies where two prompts before it part, and questions often
        begin with the same few tokens, which would fill a block for two of them alone."""
        prefix_tokens -= prefix_tokens % EngineConfig.kv_block_size
        own = self.models | self.large | {"num_state_snapshots": 16}
        result = measure_prefix(load_prompts(60), repeats, prefix_tokens, num_others=2, **own)
        change = result.hit_acceptance_length / result.miss_acceptance_length - 1
        hit_ms, miss_ms = 1e3 * result.hit_first_token_s, 1e3 * result.miss_first_token_s
        print(
            f"prefix of {prefix_tokens} tokens, {repeats} times: first token after {hit_ms:.1f} ms on a hit, "
            f"{miss_ms:.1f} ms on a miss, ratio {result.first_token_ratio:.3f}; acceptance length "
            f"{result.hit_acceptance_length:.2f} and {result.miss_acceptance_length:.2f} ({change:+.2%}); outputs "
            f"equal: {result.outputs_equal}; hits begin behind {result.fewest_cached_tokens} tokens or more",
            flush=True,
        )
        slow = result.first_token_ratio > MAX_FIRST_TOKEN_RATIO
        no_hit = result.fewest_cached_tokens < MIN_HIT_SHARE * prefix_tokens
        return int(slow) + int(abs(change) > MAX_ACCEPTANCE_DIFFERENCE) + int(not result.outputs_equal) + int(no_hit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--prompts", type=int, default=200, help="greedy; a fifth of them sampled (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--prefixes", type=int, default=8, help="%(default)s")
    parser.add_argument("--prefix-tokens", type=int, default=1500, help="%(default)s")
    args = parser.parse_args(arguments)
    pair = HybridPair(args.pair)
    num_missed = pair.greedy(args.prompts, args.max_tokens)
    num_missed += pair.sampled(max(1, args.prompts // 5), args.max_tokens)
    num_missed += pair.hits(min(20, args.prompts))
    num_missed += pair.prefix(args.prefixes, args.prefix_tokens)
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
