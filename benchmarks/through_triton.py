"""Streams prompts through a running Triton server over gRPC and prints what it measured as JSON.

Run as a process of its own, so that the client's work is not mixed with the server's: `python -m
benchmarks.through_triton --url ... --model ... < prompts.json`. Each stream sends its next prompt when the last one is
answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from dflash_backend.spec_stats import acceptance_length
from dflash_client import AsyncDFlashClient


async def measure(url: str, model: str, prompts: list[list[int]], streams: int, max_tokens: int) -> dict[str, Any]:
    """Run all prompts over `streams` streams. Raises `ClientError`."""
    todo = iter(enumerate(prompts))
    outputs: dict[int, list[int]] = {}
    first_token_s: list[float] = []
    between_s: list[float] = []
    stats: list[dict[str, Any]] = []

    async def stream() -> None:
        for index, prompt in todo:
            outputs[index], last = [], time.perf_counter()
            async for delta in client.stream(prompt, max_tokens=max_tokens, temperature=0):
                if delta.token_ids:
                    now = time.perf_counter()
                    (between_s if outputs[index] else first_token_s).append(now - last)
                    last = now
                outputs[index] += delta.token_ids
                if delta.spec_stats:
                    stats.append(delta.spec_stats)

    async with AsyncDFlashClient(url, model=model) as client:
        cpu, started = time.process_time(), time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    drafts, accepted = (sum(one[name] for one in stats) for name in ("num_drafts", "num_accepted_tokens"))
    return {
        "seconds": seconds,
        "client_cpu_s": cpu,
        "outputs": outputs,
        "first_token_s": first_token_s,
        "between_s": between_s,
        "acceptance_length": acceptance_length(drafts, accepted),
    }


def main() -> None:
    """Entry point: prompts (lists of token ids) as JSON on standard input, the measurement on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="dflash")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole measurement")
    args = parser.parse_args()
    prompts = json.load(sys.stdin)
    run = measure(args.url, args.model, prompts, args.streams, args.max_tokens)
    json.dump(asyncio.run(asyncio.wait_for(run, args.timeout)), sys.stdout)


if __name__ == "__main__":
    main()
