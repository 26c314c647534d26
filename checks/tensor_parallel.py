"""Ranks that share a target give the text of one process, and what they send for it.

`python -m checks.tensor_parallel` answers 200 prompts with one process and with 2 and 4 ranks, greedy, sampled from the
whole vocabulary and sampled with a filter, with a KV pool that is too small for all of them, prefix hits and adaptive
drafts: with embedding and head on rank 0, and with both split by vocabulary. It prints how many texts are equal, the
bytes of embedding and head on rank 0, the bytes of a step, and its time. The exit status is 1 when a text differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from typing import Any

from checks.lossless import TINY_POOL_BLOCKS, pool_of
from dflash_backend import LLM
from dflash_backend.parallel import group
from dflash_backend.parallel.group import RankGroup, vocabulary_bytes
from dflash_backend.parallel.target import TensorParallelTarget
from load_tests.prompts import load_prompts

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 1.0, "top_p": 0.95, "seed": 7},
}


@dataclass(frozen=True)
class Run:
    """What one engine did. bytes are of all steps."""

    texts: list[list[int]]
    seconds: float
    num_steps: int
    num_preemptions: int
    num_cached_tokens: int
    sum_bytes: int
    message_bytes: int


def run(llm: LLM, prompts: list[list[int]], max_tokens: int, sampling: dict[str, Any]) -> Run:
    """All prompts at once, as many in flight as the pool holds."""
    before, ranks_before = llm.stats(), _sent(llm)
    started = time.monotonic()
    outputs = llm.generate(prompts, max_tokens=max_tokens, **sampling)
    seconds, stats = time.monotonic() - started, llm.stats()
    steps, sums, messages = (after - was for after, was in zip(_sent(llm), ranks_before, strict=True))
    return Run(
        [output.token_ids for output in outputs],
        seconds,
        steps,
        stats.num_preemptions - before.num_preemptions,
        stats.prefix_cache_hits - before.prefix_cache_hits,
        sums,
        messages,
    )


def _sent(llm: LLM) -> tuple[int, int, int]:
    """Passes over all ranks, bytes of rank 0's terms of sums, and bytes of its messages."""
    target = llm.engine.runner.model.target
    if not isinstance(target, TensorParallelTarget):
        return 0, 0, 0
    assert isinstance(target.ranks, RankGroup)
    ranks = target.ranks
    return ranks.num_passes, ranks.reduce.num_bytes, ranks.message_bytes


def vocabulary_kib(llm: LLM) -> float:
    """What embedding and head take on rank 0."""
    target = llm.engine.runner.model.target
    assert isinstance(target, TensorParallelTarget)
    spec = target.local.spec
    return vocabulary_bytes(spec, target.local.lm_head.dtype) / 1024


def shared_llm(size: int, split: bool, settings: dict[str, Any]) -> LLM:
    """An engine of `size` ranks, with the vocabulary split among them or not, whatever its size."""
    before = group.MIN_SPLIT_BYTES
    group.MIN_SPLIT_BYTES = 0 if split else sys.maxsize
    try:
        return LLM(**settings, tensor_parallel_size=size)
    finally:
        group.MIN_SPLIT_BYTES = before


def check(sizes: list[int], num_prompts: int, max_tokens: int) -> bool:
    """Whether every text of every size is that of one process; prints a line for each size and way to sample."""
    settings: dict[str, Any] = {
        "kv_cache_gb": pool_of(TINY_POOL_BLOCKS),
        "max_num_seqs": 16,
        "adaptive_speculation": True,
    }
    alone = LLM(**settings)
    prompts = [alone.tokenizer.encode(row.prompt) for row in load_prompts(num_prompts)]
    # Every other one goes on from the prompt before it, so that prefixes are found again.
    prompts[1::2] = [one + other for one, other in zip(prompts[::2], prompts[1::2], strict=False)]
    expected = {name: run(alone, prompts, max_tokens, sampling) for name, sampling in SAMPLING.items()}
    print(f"one process: {', '.join(f'{name} {each.seconds:.1f} s' for name, each in expected.items())}")
    print(
        "ranks  vocabulary, KiB  sampling  equal       preemptions  cached tokens  steps  KiB a step: sums, messages  "
        "seconds"
    )
    same = True
    for size, split in itertools.product(sizes, (False, True)):
        shared = shared_llm(size, split, settings)
        vocabulary = f"{'split' if split else 'rank 0'} {vocabulary_kib(shared):8.1f}"
        for name, sampling in SAMPLING.items():
            found = run(shared, prompts, max_tokens, sampling)
            equal = sum(map(list.__eq__, found.texts, expected[name].texts))
            same = same and equal == len(prompts)
            sums, messages = (each / found.num_steps / 1024 for each in (found.sum_bytes, found.message_bytes))
            print(
                f"{size:5}  {vocabulary:>15}  {name:8}  {equal:3} of {len(prompts):3}  {found.num_preemptions:11}  "
                f"{found.num_cached_tokens:13}  {found.num_steps:5}  {sums:16.1f}, {messages:8.1f}  "
                f"{found.seconds:7.1f}",
                flush=True,
            )
        del shared
    return same


def main() -> None:
    """Entry point; exits with 1 when any text differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    raise SystemExit(0 if check(options.sizes, options.prompts, options.max_tokens) else 1)


if __name__ == "__main__":
    main()
