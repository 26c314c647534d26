"""Time to first token of a target with recurrent layers: a prefix hit against a miss.

`python -m benchmarks.recurrent_hits` builds a small random target of the Qwen3.5 family, whose text means nothing, or
takes `--target`. Each round sends a prompt of `--tokens` random tokens twice, one after the other: the second one
starts from the copy of the state behind the first one's last block. Exits with 1 when a hit takes more than `--most` of
a miss, in the median of rounds, or when first tokens differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.small_target import write_small_target
from dflash_backend.config import EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.models.recurrent_state import pool_bytes
from load_tests.markdown import markdown_table

# Three layers with a gated delta net for each one with attention, as in the family.
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def first_token(built: BuiltEngine, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the only token of an answer, and the token."""
    started = time.perf_counter()
    built.core.add_request(GenerationRequest(name, prompt, SamplingParams(max_tokens=1, temperature=0.0), ()))
    while built.core.has_unfinished():
        deltas = built.core.step().deltas
    return time.perf_counter() - started, deltas[-1].token_ids[0]


def measure(built: BuiltEngine, num_tokens: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of misses and of hits, and how many first tokens differ."""
    rng, vocab = random.Random(0), built.pair.target.vocab_size
    misses, hits, num_different = [], [], 0
    for number in range(rounds + 1):  # the first is a warm-up
        prompt = [rng.randrange(1, vocab) for _ in range(num_tokens)]
        (miss, token), (hit, again) = (first_token(built, f"{number} {part}", prompt) for part in ("miss", "hit"))
        num_different += token != again
        if number:
            misses.append(miss)
            hits.append(hit)
    return misses, hits, num_different


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory or hub id; without it a small random one")
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s")
    parser.add_argument("--most", type=float, default=0.25, help="of a miss that a hit may take (%(default)s)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dflash-hits-") as folder:
        target = args.target or str(write_small_target(Path(folder), SMALL))
        values = {"target_model": target, "draft_model": "", "max_num_seqs": 8}
        built = build_engine(EngineConfig.from_values(values))
        misses, hits, num_different = measure(built, args.tokens, args.rounds)
    net, stats = built.pair.target.decoder.delta_net, built.core.stats()
    if net is None:
        print("the target has no recurrent layers", file=sys.stderr)
        return 2
    slots = built.core.config.num_state_snapshots or 0
    size = pool_bytes(net, slots, built.runner.model.dtype) / 1024**2
    ratios = sorted(hit / miss for hit, miss in zip(hits, misses, strict=True))
    ratio = statistics.median(ratios)
    rows = [
        ["miss", f"{1e3 * statistics.median(misses):.1f}"],
        ["hit", f"{1e3 * statistics.median(hits):.1f}"],
    ]
    print(markdown_table([f"{args.tokens} tokens", "first token, ms"], rows, "lr"))
    print(f"hit over miss: {ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), at most {args.most:g} is asked")
    print(f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries} tokens of prompts were cached")
    print(f"{slots} copies of states take {size:.1f} MiB; {num_different} first tokens differ")
    return int(ratio > args.most or num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
