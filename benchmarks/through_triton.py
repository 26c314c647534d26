"""Streams prompts through a running Triton server over gRPC and prints what it measured as JSON.

Run as a process of its own, so that the client's work is not mixed with the server's: `python -m
benchmarks.through_triton --url ... --model ... < prompts.json`. Each stream is a gRPC stream of its own that sends its
next prompt when the last one is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

from dflash_backend.spec_stats import acceptance_length


def request(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The arguments of one streaming request for token ids and, at the end, the drafts' statistics."""
    ids = grpcclient.InferInput("input_ids", [len(prompt)], "INT64")
    ids.set_data_from_numpy(np.array(prompt, dtype=np.int64))
    flags = []
    for name in ("stream", "return_token_ids", "return_spec_stats"):
        flag = grpcclient.InferInput(name, [1], "BOOL")
        flag.set_data_from_numpy(np.array([True]))
        flags.append(flag)
    parameters = {"max_tokens": str(max_tokens), "temperature": "0"}
    return {
        "model_name": model,
        "inputs": [ids, *flags],
        "parameters": parameters,
        "enable_empty_final_response": True,
    }


class Stream:
    """One gRPC stream, one prompt at a time."""

    def __init__(self, url: str, model: str, max_tokens: int, todo: list[tuple[int, list[int]]]) -> None:
        self.url, self.model, self.max_tokens, self.todo = url, model, max_tokens, todo
        self.answered = asyncio.Event()
        self.outputs: dict[int, list[int]] = {}
        self.first_token_s: list[float] = []
        self.drafts = 0
        self.accepted = 0

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        while self.todo:
            self.index, prompt = self.todo.pop()
            self.outputs[self.index] = []
            self.sent = time.perf_counter()
            self.answered.clear()
            yield request(self.model, prompt, self.max_tokens)
            await self.answered.wait()

    async def run(self) -> None:
        """Answer prompts until none is left. Raises RuntimeError on an error response."""
        async with grpcclient.InferenceServerClient(self.url) as client:
            async for result, error in client.stream_infer(self._requests()):
                if error is not None:
                    raise RuntimeError(f"the server answered: {error}")
                response = result.get_response()
                self._take(result)
                final = response.parameters.get("triton_final_response")
                if final is not None and final.bool_param:
                    self.answered.set()

    def _take(self, result: grpcclient.InferResult) -> None:
        tokens = result.as_numpy("token_ids")
        if tokens is None:
            return
        output = self.outputs[self.index]
        if not output and len(tokens):
            self.first_token_s.append(time.perf_counter() - self.sent)
        output += tokens.tolist()
        stats = result.as_numpy("spec_stats")
        if stats is not None and len(stats) and stats[0]:
            numbers = json.loads(stats[0])
            self.drafts += numbers["num_drafts"]
            self.accepted += numbers["num_accepted_tokens"]


async def measure(url: str, model: str, prompts: list[list[int]], streams: int, max_tokens: int) -> dict[str, Any]:
    """Run all prompts over `streams` streams."""
    todo = list(enumerate(prompts))[::-1]
    workers = [Stream(url, model, max_tokens, todo) for _ in range(streams)]
    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker.run() for worker in workers))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    outputs = {index: tokens for worker in workers for index, tokens in worker.outputs.items()}
    return {
        "seconds": seconds,
        "client_cpu_s": cpu,
        "outputs": outputs,
        "first_token_s": [value for worker in workers for value in worker.first_token_s],
        "acceptance_length": acceptance_length(
            sum(worker.drafts for worker in workers), sum(worker.accepted for worker in workers)
        ),
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
