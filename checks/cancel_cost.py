"""Prints what it costs to ask Triton whether the clients of 64 requests are still there.

`python -m checks.cancel_cost` exits with 1 when 63 more requests take more than `MAX_SHARE` of a core. The engine
runs one request at a time, which does not stream, so that asking is nearly all that the stub does: the difference
between 64 requests in flight and one is the cost of asking about 63 more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from dflash_cli.launcher.processes import family
from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient

IN_FLIGHT = (1, 64)
SECONDS = 4.0
# `triton.cancellation` spreads its questions out so that 64 requests cost the stub no more of a core than this.
MAX_SHARE = 0.1
SETTINGS = {"max_num_seqs": "1", "max_model_len": "4096", "num_speculative_tokens": "0", "kv_cache_gb": "0.2"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def stub_pid(server_pid: int) -> int:
    """The stub process of a server with one model."""
    for process in family(server_pid):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        if process.pid != server_pid and b"triton_python_backend_stub" in command:
            return process.pid
    raise RuntimeError("the server has no stub process")


async def shares(server: TritonServer, in_flight: int) -> tuple[float, float]:
    """The stub's and the server's share of a core with so many requests in flight."""
    stub = stub_pid(server.pid)
    async with AsyncDFlashClient(server.grpc_url, timeout_s=60) as client:
        tasks = [
            asyncio.create_task(client.generate(f"Count from {n}.", temperature=0, max_tokens=4000, ignore_eos=True))
            for n in range(in_flight)
        ]
        await asyncio.sleep(1.0)
        before, start = (cpu_s(stub), cpu_s(server.pid)), time.monotonic()
        await asyncio.sleep(SECONDS)
        after, seconds = (cpu_s(stub), cpu_s(server.pid)), time.monotonic() - start
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(1.0)
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds


def misses(measured: list[tuple[float, float]]) -> list[str]:
    """What misses its bound, in words. `measured`: shares of the stub and of the server, for each of `IN_FLIGHT`."""
    (few, _), (many, _) = measured
    if many - few <= MAX_SHARE:
        return []
    return [f"{IN_FLIGHT[1] - IN_FLIGHT[0]} more requests take {many - few:.1%} of a core; at most {MAX_SHARE:.0%}"]


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with TritonServer(SETTINGS, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as server:
        measured = [asyncio.run(shares(server, number)) for number in IN_FLIGHT]
    print("requests in flight  stub's share of a core  server's share of a core")
    for number, (stub, parent) in zip(IN_FLIGHT, measured, strict=True):
        print(f"{number:18}  {stub:22.2%}  {parent:24.2%}")
    found = misses(measured)
    print("\n".join(found) or "the bound holds")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
