"""Prints what it costs to ask Triton whether the clients of 64 requests are still there.

`python -m checks.cancel_cost` exits with 1 when 63 more requests take more than `MAX_SHARE` of a core. The engine
runs one request at a time, which does not stream, so that asking is nearly all that the stub does: the difference
between 64 requests in flight and one is the cost of asking about 63 more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient
from load_tests.server_state import cpu_seconds, processes_by_role

IN_FLIGHT = (1, 64)
SECONDS = 4.0
# `triton.cancellation` spreads its questions out so that 64 requests cost the stub no more of a core than this.
MAX_SHARE = 0.1
SETTINGS = {"max_num_seqs": "1", "max_model_len": "4096", "num_speculative_tokens": "0", "kv_cache_gb": "0.2"}


async def shares(server: TritonServer, in_flight: int) -> tuple[float, float]:
    """The stub's and the server's share of a core with this many requests in flight."""
    processes = processes_by_role(server.pid)

    def used() -> tuple[float, float]:
        return cpu_seconds(processes["stub"]), cpu_seconds(processes["server"])

    async with AsyncDFlashClient(server.grpc_url, timeout_s=60) as client:
        tasks = [
            asyncio.create_task(client.generate(f"Count from {n}.", temperature=0, max_tokens=4000, ignore_eos=True))
            for n in range(in_flight)
        ]
        await asyncio.sleep(1.0)
        before, start = used(), time.monotonic()
        await asyncio.sleep(SECONDS)
        after, seconds = used(), time.monotonic() - start
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
