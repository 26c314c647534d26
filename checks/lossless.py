"""Greedy output of every way to run the engine against `transformers`, token for token (invariant LOSSLESS).

`python -m checks.lossless` prints, for each case, how many of the prompts agree, how often requests were preempted
and the acceptance length. The write guard is on throughout. With `--draft DIR [DIR ...]` the cases are those of other
drafters of the demo target, of any kind (`make demo-model DRAFTER=dflash2`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measurement, run_engine, run_transformers
from checks.core_state import check_core
from dflash_backend import LLM
from dflash_backend.checkpoints import read_target
from dflash_backend.config import NGRAM, EngineConfig, asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.worker.kv_cache import bytes_per_block
from dflash_backend.worker.memory import GIB
from load_tests.prompts import load_prompts

SMALL_POOL_BLOCKS = 48
# With chunks of 64 tokens fewer requests run at a time, so the pool must be smaller for them to collide.
TINY_POOL_BLOCKS = 24
STREAMS = 32


@dataclass(frozen=True)
class Case:
    """One way to run: settings, and how many requests are in flight."""

    name: str
    streams: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class CaseResult:
    """How a case came out."""

    case: Case
    num_equal: int
    num_prompts: int
    num_preemptions: int
    num_cached_tokens: int
    acceptance_length: float | None


def pool_of(num_blocks: int, **settings: Any) -> float:
    """`kv_cache_gb` that holds this many blocks of the demo pair, or what `settings` name, in float32."""
    config = EngineConfig.from_values(settings)
    pair = resolve_pair(config)
    draft = pair.draft_model.decoder if pair.draft_model else None
    return (num_blocks + 0.5) * bytes_per_block(pair.target.decoder, draft, config.kv_block_size, torch.float32) / GIB


def cases() -> list[Case]:
    """What must all give the same tokens."""
    small = {"kv_cache_gb": pool_of(SMALL_POOL_BLOCKS)}
    tiny = {"kv_cache_gb": pool_of(TINY_POOL_BLOCKS)}
    tiny_ngram = {"draft_model": NGRAM, "kv_cache_gb": pool_of(TINY_POOL_BLOCKS, draft_model=NGRAM)}
    return [
        Case("k = 0", 8, {"num_speculative_tokens": 0}),
        Case("DFlash, one stream", 1, {}),
        Case("DFlash, 32 streams", 32, {}),
        Case("DFlash, 32 streams, no prefix cache", 32, {"enable_prefix_caching": False}),
        Case("DFlash, chunks of 64 tokens", 32, {"max_num_batched_tokens": 64}),
        Case("DFlash, small KV pool", 32, small),
        Case("DFlash, small KV pool, no prefix cache", 32, small | {"enable_prefix_caching": False}),
        Case("DFlash, small KV pool, chunks of 64 tokens", 32, tiny | {"max_num_batched_tokens": 64}),
        Case("DFlash, k = 4", 32, {"num_speculative_tokens": 4}),
        Case("DFlash, as many drafts as pay", 32, tiny | {"adaptive_speculation": True}),
        Case("n-grams, one stream", 1, {"draft_model": NGRAM}),
        Case("n-grams, small KV pool, chunks of 64 tokens", 32, tiny_ngram | {"max_num_batched_tokens": 64}),
    ]


def drafter_cases(draft: Path) -> list[Case]:
    """What must give the same tokens with another drafter of the demo target."""
    own = {"draft_model": str(draft)}
    small, tiny = ({"kv_cache_gb": pool_of(size, **own)} for size in (SMALL_POOL_BLOCKS, TINY_POOL_BLOCKS))
    return [
        Case("one stream", 1, own),
        Case("32 streams", STREAMS, own),
        Case("small KV pool", STREAMS, own | small),
        Case("small KV pool, chunks of 64 tokens", STREAMS, own | tiny | {"max_num_batched_tokens": 64}),
        Case("two drafts", STREAMS, own | {"num_speculative_tokens": 2}),
        Case("as many drafts as pay", STREAMS, own | small | {"adaptive_speculation": True}),
    ]


def reference(prompts: list[list[int]], max_tokens: int, batch: int = 8, target: Path | None = None) -> Measurement:
    """`transformers` `generate` in float32, in small batches. target: by default the demo's."""
    from transformers import AutoModelForCausalLM

    directory = target or asset_path("demo", "pair", "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    eos = read_target(directory).eos_token_ids[0]
    return run_transformers(model, prompts, batch, max_tokens, eos)


def run_case(case: Case, prompts: list[list[int]], expected: Measurement, max_tokens: int) -> CaseResult:
    """Run a case over the prompts, which are those of `expected` or the first of them, and compare."""
    llm = LLM(**{"kv_write_guard": True, "adaptive_speculation": False} | case.settings)
    run = run_engine(case.name, llm, prompts, case.streams, max_tokens)
    check_core(llm.engine.core)
    stats = llm.stats()
    equal = sum(tokens == expected.outputs[index] for index, tokens in run.outputs.items())
    return CaseResult(case, equal, len(prompts), stats.num_preemptions, stats.prefix_cache_hits, run.acceptance_length)


def main() -> None:
    """Entry point; exits with 1 when any output differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft", type=Path, nargs="+", metavar="DIR", help="other drafters of the demo target")
    args = parser.parse_args()
    tokenizer = LLM(draft="").tokenizer
    prompts = [tokenizer.encode(row.prompt) for row in load_prompts(args.prompts)]
    expected = reference(prompts, args.max_tokens)
    different = 0
    for draft in args.draft or [None]:
        if draft is not None:
            print(f"{draft}: {read_draft(draft).method}")
        print(f"{'case':45} {'equal':>12} {'preemptions':>12} {'cached tokens':>14} {'acceptance':>11}")
        for case in cases() if draft is None else drafter_cases(draft):
            result = run_case(case, prompts, expected, args.max_tokens)
            different += result.num_prompts - result.num_equal
            accepted = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
            print(
                f"{case.name:45} {result.num_equal:>5} of {result.num_prompts:<3} {result.num_preemptions:>12} "
                f"{result.num_cached_tokens:>14} {accepted:>11}",
                flush=True,
            )
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
