"""Streaming through the OpenAI front end against native streaming over gRPC, on the same server.

`python -m benchmarks.openai --streams 32` starts a Triton server with the demo pair and a front end. Each round runs
all prompts natively and through the front end, in turn, so that other work of the machine slows both alike. The client
is a process of its own in each way: our gRPC client, and for HTTP a plain reader of server-sent events. The table has
medians over rounds; the ratios are those of each round. With `--triton` and `--openai` it measures servers that run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.progress import progress
from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.ports import settle_ports
from dflash_cli.launcher.server import TritonServer
from load_tests.markdown import markdown_table
from load_tests.prompts import load_prompts

NATIVE, OPENAI = "native gRPC", "OpenAI front end"
HOST = "127.0.0.1"
CLIENT_TIMEOUT_S = 600.0


async def stream_over_http(
    url: str, model: str, prompts: list[list[int]], streams: int, max_tokens: int
) -> dict[str, Any]:
    """Run all prompts over `streams` connections; seconds, times to the first token, and tokens."""
    todo = iter(prompts)
    first_token_s: list[float] = []
    num_tokens = 0
    address = urlsplit(url)

    async def stream() -> None:
        nonlocal num_tokens
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for prompt in todo:
            fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
            body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
            sent = time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"the front end answered {status.decode().strip()}")
            while (await reader.readline()).strip():
                pass
            first, text = None, b""
            while size := int(await reader.readline(), 16):
                text += (await reader.readexactly(size + 2))[:-2]
                first = time.perf_counter() - sent if first is None else first
            await reader.readline()
            first_token_s.append(first or 0.0)
            *_, last, _ = (event for event in text.split(b"\n\n") if event)
            num_tokens += json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
        writer.close()

    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"seconds": seconds, "first_token_s": first_token_s, "num_tokens": num_tokens, "client_cpu_s": cpu}


async def stream_over_grpc(
    url: str, model: str, prompts: list[list[int]], streams: int, max_tokens: int
) -> dict[str, Any]:
    """As `stream_over_http`, natively."""
    from benchmarks.through_triton import measure

    found = await measure(url, model, prompts, streams, max_tokens)
    found["num_tokens"] = sum(map(len, found.pop("outputs").values()))
    return found


def run_client(way: str, url: str, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.openai", "--client", way, "--url", url, "--model", args.model]
    command += ["--streams", str(args.streams), "--max-tokens", str(args.max_tokens)]
    done = subprocess.run(
        command, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, timeout=CLIENT_TIMEOUT_S, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URLs of a Triton server and of a front end before it; started here unless they are given."""
    if args.triton and args.openai:
        yield args.triton, args.openai
        return
    settings = {"max_num_seqs": str(args.streams), "max_model_len": "1024"}
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with TritonServer(settings, host=HOST, **ports) as server:  # type: ignore[arg-type]
        port = settle_ports(HOST, {"--port": 0})["--port"]
        frontend = FrontendProcess(HOST, port, ["--model-name", server.model_name])
        try:
            frontend.launch(server.grpc_url, server.metrics_url)
            frontend.start()
            yield server.grpc_url, frontend.url
        finally:
            frontend.stop()


def report(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The table, and the ratios."""
    rows = []
    for way, found in runs.items():
        speed = statistics.median(run["num_tokens"] / run["seconds"] for run in found)
        first = statistics.median(statistics.median(run["first_token_s"]) for run in found)
        cpu = statistics.median(run["client_cpu_s"] / run["seconds"] for run in found)
        rows.append([way, f"{speed:.0f}", f"{1000 * first:.1f}", f"{cpu:.2f}"])
    pairs = list(zip(runs[NATIVE], runs[OPENAI], strict=True))
    ratios = sorted(
        (http["num_tokens"] / http["seconds"]) / (grpc["num_tokens"] / grpc["seconds"]) for grpc, http in pairs
    )
    later = sorted(
        1000 * (statistics.median(http["first_token_s"]) - statistics.median(grpc["first_token_s"]))
        for grpc, http in pairs
    )
    table = markdown_table(["", "tokens/s", "time to first token, ms", "client's cores"], rows, "lrrr")
    return (
        f"{table}\n\ntokens/s, front end over native: {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f})\n"
        f"time to first token, front end less native: {statistics.median(later):+.1f} ms "
        f"({later[0]:+.1f} to {later[-1]:+.1f})"
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", metavar="HOST:PORT", help="gRPC address of a server that runs")
    parser.add_argument("--openai", metavar="URL", help="its front end, http://HOST:PORT")
    parser.add_argument("--model", default="dflash", help="%(default)s")
    parser.add_argument("--streams", type=int, default=32, help="%(default)s")
    parser.add_argument("--count", type=int, default=96, help="prompts of a round (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--client", choices=(NATIVE, OPENAI), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        measure = stream_over_grpc if args.client == NATIVE else stream_over_http
        json.dump(
            asyncio.run(measure(args.url, args.model, json.load(sys.stdin), args.streams, args.max_tokens)), sys.stdout
        )
        return 0
    from dflash_backend.config import asset_path
    from dflash_backend.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(asset_path("demo", "pair", "target"))
    prompts = [tokenizer.encode(row.prompt) for row in load_prompts(args.count)]
    runs: dict[str, list[dict[str, Any]]] = {NATIVE: [], OPENAI: []}
    with servers(args) as (triton, openai):
        urls = {NATIVE: triton, OPENAI: openai}
        for way, url in urls.items():
            run_client(way, url, prompts[: args.streams], args)  # warm-up
        so_far = progress("rounds")
        for done in range(args.rounds):
            so_far.step(done, args.rounds)
            for way, url in urls.items():
                runs[way].append(run_client(way, url, prompts, args))
    print(report(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
