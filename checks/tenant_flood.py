"""A tenant with 500 long prompts in the queue: how long another tenant's short requests take, against alone.

`python -m checks.tenant_flood`; `--tenants N` shares the prompts out among as many tenants. Every prompt has words of
its own, so that the prefix cache does not help. The exit status is 0 when the median time of a short request beside the
flood is at most 3 times the idle one, or as many times as there are tenants, if more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass

from checks.flooded import FloodedTimes
from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient, ClientError

WORDS = (
    "Sam",
    "fills",
    "bags",
    "with",
    "marbles",
    "and",
    "gives",
    "away",
    "lakes",
    "tickets",
    "apples",
    "every",
    "week",
)
NUM_WORDS = 2600
PAUSE_S = 0.2


@dataclass(frozen=True)
class TenantFlood(FloodedTimes):
    """Times of short requests, and how many of the flood's prompts there were and were answered by the end, and of how
    many tenants they were."""

    num_prompts: int
    num_answered: int
    num_tenants: int = 1

    @property
    def allowed_ratio(self) -> float:
        """The most that `ratio` may be: each tenant has a right to its share."""
        return max(super().allowed_ratio, self.num_tenants + 1.0)

    def __str__(self) -> str:
        return (
            f"a short request, {super().__str__()}; {self.num_answered} of {self.num_prompts} long ones were answered"
        )


async def measure(url: str, num_prompts: int, seconds: float, num_tenants: int = 1, seed: int = 0) -> TenantFlood:
    """Ask short questions for a quarter of `seconds` alone, then for `seconds` beside `num_prompts` long prompts of
    `num_tenants` tenants."""
    rng = random.Random(seed)
    async with AsyncDFlashClient(url, timeout_s=600) as client:

        async def flood(number: int) -> bool:
            prompt, tenant = " ".join(rng.choices(WORDS, k=NUM_WORDS)), f"flood-{number % num_tenants}"
            result = await client.generate(prompt, max_tokens=16, ignore_eos=True, tenant=tenant)
            return result.num_output_tokens == 16

        await ask(client, 2 * PAUSE_S)
        idle = await ask(client, seconds / 4)
        tasks = [asyncio.create_task(flood(number)) for number in range(num_prompts)]
        await asyncio.sleep(1.0)
        flooded = await ask(client, seconds)
        answered = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [error for error in ended if isinstance(error, ClientError)]
    if failed:
        raise failed[0]
    return TenantFlood(idle, flooded, num_prompts, len(answered), num_tenants)


async def ask(client: AsyncDFlashClient, seconds: float) -> list[float]:
    """Ask one short question after the other for so long; the seconds of each."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        await client.generate("Hello", max_tokens=4, ignore_eos=True, temperature=0, tenant="other")
        times.append(time.monotonic() - started)
        await asyncio.sleep(PAUSE_S)
    return times


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=500, help="long prompts in the queue (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long beside them (%(default)s)")
    parser.add_argument("--tenants", type=int, default=1, help="tenants that they belong to (%(default)s)")
    args = parser.parse_args()
    with TritonServer(host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as server:
        flooded = asyncio.run(measure(server.grpc_url, args.prompts, args.seconds, args.tenants))
    print(flooded)
    found = flooded.misses()
    print("\n".join(found) or "the bound holds")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
