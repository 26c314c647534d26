"""`make bench`: transformers, our engine without and with DFlash, and DFlash through Triton, in one run.

All systems answer the same held-out prompts of the demo pair greedily in float32 with the same number of threads, and
their outputs are compared token by token: the exit status is 1 when any differs. Ratios are what to quote: machines
differ and are noisy. What Triton costs is measured in pairs, in-process and through the server one right after the
other, since a machine's speed drifts by more than that within a run; the median pair counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.measure import Measurement, measure_host_share, run_engine, run_transformers
from benchmarks.prefix import measure_prefix
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_cli.launcher.server import TritonServer
from load_tests.prompts import load_prompts

STREAMS = (1, 8, 32)
# How often a measurement of a pair goes through the prompts.
PAIR_ROUNDS = 3


def load_reference() -> torch.nn.Module:
    """The demo target in `transformers`, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32)
    return model.eval()


def through_triton(url: str, prompts: list[list[int]], streams: int, max_tokens: int) -> Measurement:
    """Run the streaming client in a process of its own against a server that is up."""
    command = [sys.executable, "-m", "benchmarks.through_triton", "--url", url, "--streams", str(streams)]
    command += ["--max-tokens", str(max_tokens)]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the streaming client failed: {done.stderr.strip().splitlines()[-1]}")
    data = json.loads(done.stdout)
    outputs = {int(index): tokens for index, tokens in data.pop("outputs").items()}
    num_tokens = sum(len(tokens) for tokens in outputs.values())
    return Measurement(report.TRITON, streams, num_tokens=num_tokens, outputs=outputs, **data)


def best_of(repeats: int, measure: Callable[[], Measurement]) -> Measurement:
    """The fastest of several measurements: what the machine can do when nothing else runs."""
    return min((measure() for _ in range(repeats)), key=lambda run: run.seconds)


def _engine_at(name: str, llm: LLM, prompts: list[list[int]], max_tokens: int, streams: int) -> Measurement:
    return run_engine(name, llm, prompts, streams, max_tokens)


def run_pairs(
    llm: LLM, url: str, prompts: list[list[int]], max_tokens: int, num_pairs: int
) -> list[tuple[Measurement, Measurement]]:
    """In-process and through Triton in turn, at the largest number of streams, long enough for a steady state."""
    load = prompts * PAIR_ROUNDS
    pairs = []
    for _ in range(num_pairs):
        inside = run_engine(report.DFLASH, llm, load, STREAMS[-1], max_tokens)
        through = through_triton(url, load, STREAMS[-1], max_tokens)
        pairs.append((inside, through))
        print(
            f"{STREAMS[-1]} streams, in-process and through Triton: {inside.tokens_per_s:.0f} and "
            f"{through.tokens_per_s:.0f} tokens/s, ratio {through.tokens_per_s / inside.tokens_per_s:.2f}; the client "
            f"takes {through.client_cpu_share:.0%} of a core",
            flush=True,
        )
    return pairs


def run_all(prompts: list[list[int]], max_tokens: int, repeats: int, num_pairs: int) -> report.Runs:
    """Every system at every number of streams, and the pairs."""
    runs = []
    model = load_reference()
    engines = {
        report.NO_DRAFT: LLM(num_speculative_tokens=0, enable_prefix_caching=False),
        report.DFLASH: LLM(enable_prefix_caching=False),
    }
    eos = engines[report.DFLASH].tokenizer.eos_token_ids[0]
    systems: dict[str, Callable[[int], Measurement]] = {
        report.BASELINE: lambda streams: run_transformers(model, prompts, streams, max_tokens, eos)
    }
    for name, llm in engines.items():
        run_engine(name, llm, prompts[:4], 2, 16)  # warm-up
        systems[name] = partial(_engine_at, name, llm, prompts, max_tokens)
    for name, system in systems.items():
        for streams in STREAMS:
            runs.append(best_of(repeats, partial(system, streams)))
            print(f"{name}, {streams} streams: {runs[-1].tokens_per_s:.0f} tokens/s", flush=True)
    host = measure_host_share(engines[report.DFLASH], prompts, STREAMS[-1], max_tokens)
    print(f"{report.host_line(host)}, {host.share:.1%}", flush=True)
    settings = {"enable_prefix_caching": "false"}
    with TritonServer(settings=settings, http_port=0, grpc_port=0, metrics_port=0) as server:
        through_triton(server.grpc_url, prompts[:4], 2, 16)  # warm-up
        for streams in STREAMS:
            runs.append(best_of(repeats, partial(through_triton, server.grpc_url, prompts, streams, max_tokens)))
            print(
                f"{report.TRITON}, {streams} streams: {runs[-1].tokens_per_s:.0f} tokens/s, the client takes "
                f"{runs[-1].client_cpu_share:.0%} of a core",
                flush=True,
            )
        pairs = run_pairs(engines[report.DFLASH], server.grpc_url, prompts, max_tokens, num_pairs)
    ratios = [through.tokens_per_s / inside.tokens_per_s for inside, through in pairs]
    return report.Runs(runs, through_ratio=statistics.median(ratios), through_ratios=ratios, host=host)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results are written")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts, over all categories")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each system; the fastest counts")
    parser.add_argument("--pairs", type=int, default=7, help="measurements in-process and through Triton in turn")
    args = parser.parse_args()
    held_out = load_prompts(args.prompts)
    tokenizer = LLM(draft="").tokenizer
    runs = run_all([tokenizer.encode(row.prompt) for row in held_out], args.max_tokens, args.repeats, args.pairs)
    prefix = measure_prefix(held_out)
    settings: dict[str, Any] = {
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "pairs": args.pairs,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print("\n" + report.write(args.out, runs, prefix, settings))
    found = report.misses(runs.runs, prefix)
    print("\n".join(found) or "all outputs are equal")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
