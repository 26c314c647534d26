"""A target's KV cache in FP8: how many blocks there are of it, what it costs of acceptance, and that drafts change no
text.

`python -m checks.kv_cache` prints the arithmetic for Qwen3-8B with a drafter of five layers and for the demo pair, the
blocks that the engine has, acceptance and accuracy beside the KV of `dtype`, and how many greedy and sampled texts are
those of the same target without a drafter. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.gpu.shapes import qwen3_8b
from checks.acceptance import held_out, measure, texts
from dflash_backend import LLM
from dflash_backend.attention import FP8
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.evaluation import Evaluation
from dflash_backend.worker.kv_cache import bytes_per_block
from load_tests.prompts import load_prompts

MOST_BLOCKS_APART = 0.01
MOST_ACCEPTANCE_APART = 0.02
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "seed": 5}}
BLOCK_SIZE = EngineConfig.kv_block_size


def block_ratio(target: DecoderSpec, draft: DecoderSpec | None, dtype: torch.dtype) -> float:
    """How many times as many blocks fit where the target's KV is in FP8, by their bytes."""
    plain, own = (bytes_per_block(target, draft, BLOCK_SIZE, dtype, kv_dtype) for kv_dtype in (None, FP8))
    return plain / own


def load(**settings: Any) -> LLM:
    """The demo pair. The pool is as large as it says, since requests use less of it."""
    return LLM(adaptive_speculation=False, kv_cache_gb=0.05, max_model_len=2048, **settings)


def blocks() -> list[str]:
    """Print the arithmetic and what engines have; which of them miss it, in words."""
    shape, pair = qwen3_8b(), resolve_pair(EngineConfig())
    assert pair.draft_model is not None
    published = block_ratio(shape.target.decoder, shape.draft.decoder, torch.bfloat16)
    print(f"Qwen3-8B with a drafter of five layers, bfloat16: {published:.3f} times the blocks")
    missed = []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        expected = block_ratio(pair.target.decoder, pair.draft_model.decoder, dtype)
        plain, own = (load(dtype=name, **kv).engine.ready.num_kv_blocks for kv in ({}, {"kv_cache_dtype": "fp8"}))
        print(
            f"demo pair, {name}: {expected:.3f} times by the bytes; {own} blocks and {plain}: {own / plain:.3f} times"
        )
        if abs(own / plain / expected - 1) > MOST_BLOCKS_APART:
            missed.append(f"blocks in {name} are {own / plain:.3f} times as many, not {expected:.3f}")
    return missed


def lossless(count: int, max_tokens: int) -> list[str]:
    """Print how many texts are those without a drafter; what differs, in words."""
    prompts = [row.prompt for row in load_prompts(count)]
    missed = []
    for name, sampling in SAMPLINGS.items():
        alone, drafted = (
            [
                out.token_ids
                for out in load(kv_cache_dtype="fp8", kv_write_guard=True, **draft).generate(
                    prompts, max_tokens=max_tokens, **sampling
                )
            ]
            for draft in ({"draft": ""}, {})
        )
        equal = sum(mine == theirs for mine, theirs in zip(alone, drafted, strict=True))
        print(f"{name}: {equal} of {count} texts are those without a drafter", flush=True)
        if equal < count:
            missed.append(f"{count - equal} {name} texts differ with a drafter")
    return missed


def quality(per_set: int) -> tuple[Evaluation, Evaluation, list[str]]:
    """Greedy answers over the KV of `dtype` and over FP8; print what they cost, and say what is missed."""
    questions = held_out(per_set)
    plain, own = (measure(load(**kv), questions) for kv in ({}, {"kv_cache_dtype": "fp8"}))
    lengths = [evaluation.overall.counts.acceptance_length for evaluation in (plain, own)]
    for name, evaluation, length in zip(("dtype", "fp8"), (plain, own), lengths, strict=True):
        math = next(group for group in evaluation.categories if group.name == "math")
        print(f"KV in {name}: acceptance length {length:.3f}, accuracy of math {math.accuracy:.3f}")
    same = sum(mine == theirs for mine, theirs in zip(texts(plain), texts(own), strict=True))
    share = lengths[1] / lengths[0]
    print(f"acceptance {share - 1:+.2%}; {same} of {len(questions)} answers have the same text")
    missed = abs(share - 1) > MOST_ACCEPTANCE_APART
    return plain, own, [f"acceptance changes by {share - 1:+.2%}"] if missed else []


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="prompts of the lossless part (%(default)s)")
    parser.add_argument("--questions", type=int, default=100, help="held-out questions of each set (%(default)s)")
    arguments = parser.parse_args()
    missed = blocks() + lossless(arguments.prompts, 128) + quality(arguments.questions)[2]
    print("\n".join(missed) or "every bound holds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
