"""KV memory that a long request holds: with one block table for all layers, and with blocks of their own for layers
with a sliding window, which are given back once no query sees them.

`python -m benchmarks.window_blocks` builds a small random target of gpt-oss's kind, every second layer with a window,
whose text means nothing, or takes `--target`. For each length it serves one request that grows to it and prints the
most that it held, in MiB. Exits with 1 when layers with a window hold more than a window, two steps' tokens and what a
row reserves.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.small_target import write_small_target
from dflash_backend.config import EngineConfig
from dflash_backend.core.plan import SchedulerOutput
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.worker.kv_cache import bytes_per_block, window_bytes_per_block
from load_tests.markdown import markdown_table

MIB = 1024**2
NUM_NEW = 64
SMALL: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "dtype": "float32",
}


def most_held(built: BuiltEngine, num_tokens: int) -> tuple[int, int]:
    """The most blocks that a request of `num_tokens` tokens held at a time, and of layers with a window."""
    rng, scheduler = random.Random(num_tokens), built.core.scheduler
    prompt = [rng.randrange(1, built.pair.target.vocab_size) for _ in range(num_tokens - NUM_NEW)]
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    built.core.add_request(GenerationRequest(str(num_tokens), prompt, sampling, ()))
    most = most_of_windows = 0
    submit = built.runner.submit

    def note(plan: SchedulerOutput) -> None:
        nonlocal most, most_of_windows
        for request in scheduler.running.values():
            most = max(most, len(request.block_ids))
            most_of_windows = max(most_of_windows, len(request.window_block_ids) - request.num_window_freed)
        submit(plan)

    with patch.object(built.runner, "submit", note):
        while built.core.has_unfinished():
            built.core.step()
    return most, most_of_windows


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory or hub id; without it a small random one")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 16000], help="1000 4000 16000")
    parser.add_argument("--step-tokens", type=int, default=512, help="of a step (%(default)s)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dflash-windows-") as folder:
        target = args.target or str(write_small_target(Path(folder), SMALL))
        values = {"target_model": target, "draft_model": "", "max_num_seqs": 4, "device": "cpu"}
        built = build_engine(EngineConfig.from_values({**values, "max_num_batched_tokens": args.step_tokens}))
        held = {num_tokens: most_held(built, num_tokens) for num_tokens in args.tokens}
    group, size = built.core.config.window_group, built.core.config.block_size
    if group is None:
        print("no layer of the target has KV blocks of its own", file=sys.stderr)
        return 2
    decoder, dtype = built.pair.target.decoder, built.runner.model.dtype
    whole, of_windows = bytes_per_block(decoder, None, size, dtype), window_bytes_per_block(decoder, size, dtype)
    rows = []
    for num_tokens, (most, most_of_windows) in held.items():
        before, after = most * whole, most * (whole - of_windows) + most_of_windows * of_windows
        share = f"{after / before:.2f}"
        rows.append([f"{num_tokens:,}", f"{before / MIB:.2f}", f"{after / MIB:.2f}", share, str(most_of_windows)])
    header = ["tokens", "one table, MiB", "own blocks, MiB", "share", "blocks of windows"]
    print(markdown_table(header, rows, "rrrrr"))
    print(
        f"window of {group.window} positions, blocks of {size}, steps of {group.max_step_tokens} tokens: a request "
        f"holds at most {group.most_blocks} blocks of layers with a window"
    )
    num_blocks = built.core.config.num_blocks
    together = num_blocks * (whole - of_windows) + group.num_blocks * of_windows
    print(
        f"in {together / MIB:.0f} MiB: {num_blocks * size:,} positions ({together // whole * size:,} with one table), "
        f"and {group.num_blocks} blocks of windows for {built.core.config.max_num_seqs} requests and for prefix hits"
    )
    return int(max(most_of_windows for _, most_of_windows in held.values()) > group.most_blocks)


if __name__ == "__main__":
    sys.exit(main())
