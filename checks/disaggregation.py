"""A prefill server and a decode server beside one that does both: texts, acceptance, time to first token.

`python -m checks.disaggregation` starts three servers of the demo pair, asks `--users` prompts of `--tokens` tokens at
the same time of the two and then of the one, and kills the engine of the prefill server and that of the decode server
`--kills` times each under load. The exit status is 1 where a text differs, where the prompts were not fetched, where
acceptance differs by more than a hundredth, where a request fails other than by the end of the decode server's engine
(what a prefill server does not give, the decode server computes), or where a block stays in use. With `--backend nixl`
records move through NIXL; without the package it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from checks.exit_status import SKIPPED
from checks.front_end import HOST
from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient, ClientError
from dflash_client.errors import Internal, Unavailable
from load_tests.server_state import MetricsPage, engine_pids

NUM_OUTPUT = 32
RESTART_S = 120.0
KEPT_S = 60  # kv_transfer_timeout_s: above what 64 prompts wait for
MAX_ACCEPTANCE_DIFFERENCE = 0.01


@dataclass
class Round:
    """Answers of one round: token ids by prompt, seconds to the first token, tokens a second, accepted drafts and draft
    blocks, and errors by prompt."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    tokens_s: float = 0.0
    num_accepted: int = 0
    num_drafts: int = 0
    errors: dict[int, Exception] = field(default_factory=dict)

    @property
    def acceptance(self) -> float:
        """Mean tokens of a step with drafts."""
        return 1 + self.num_accepted / max(1, self.num_drafts)


def prompts(num_users: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of which no two begin alike."""
    rng = random.Random(seed)
    return [[rng.randrange(5, 1400) for _ in range(num_tokens)] for _ in range(num_users)]


async def prefilled(prefill: AsyncDFlashClient, prompt: list[int], **sampling: Any) -> dict[str, Any] | None:
    """By what a prompt's KV can be fetched; None where the prefill server ended the request, as when it was killed."""
    given = {"do_remote_decode": True}
    with contextlib.suppress(Internal, Unavailable):
        return (await prefill.generate(prompt, max_tokens=1, kv_transfer_params=given, **sampling)).kv_transfer_params
    return None


async def ask(
    prefill: AsyncDFlashClient | None, decode: AsyncDFlashClient, asked: list[list[int]], into: Round
) -> None:
    """Ask all prompts at the same time, of a prefill server first where there is one."""
    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

    async def one(number: int, prompt: list[int]) -> None:
        began, first_s, own = time.monotonic(), None, dict(sampling)
        try:
            if prefill is not None:
                own["kv_transfer_params"] = await prefilled(prefill, prompt, **sampling)
            tokens: list[int] = []
            async for delta in decode.stream(prompt, max_tokens=NUM_OUTPUT, **own):
                first_s = time.monotonic() - began if first_s is None else first_s
                tokens += delta.token_ids
                if delta.spec_stats is not None:
                    into.num_accepted += delta.spec_stats["num_accepted_tokens"]
                    into.num_drafts += delta.spec_stats["num_drafts"]
        except ClientError as error:
            into.errors[number] = error
            return
        into.tokens[number] = tuple(tokens)
        into.first_s.append(first_s or 0.0)

    began = time.monotonic()
    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(asked)))
    into.tokens_s = sum(map(len, into.tokens.values())) / (time.monotonic() - began)


def loaded_tokens(server: TritonServer) -> int:
    """Prompt tokens that a decode server has fetched so far."""
    return int(MetricsPage.read(server.metrics_url).by("dflash:kv_tier_hit_tokens_total", "tier").get("remote", 0))


def described(name: str, one: Round) -> str:
    """A line of figures."""
    return (
        f"{name}: first token {statistics.median(one.first_s) * 1e3:.0f} ms (median), {one.tokens_s:.0f} tokens/s, "
        f"acceptance {one.acceptance:.3f}, {len(one.errors)} errors"
    )


def differences(two: Round, one: Round) -> list[str]:
    """Texts of two servers that are not those of one."""
    return [
        f"prompt {n}: {tokens} is not {one.tokens[n]}" for n, tokens in two.tokens.items() if tokens != one.tokens[n]
    ]


async def ready(client: AsyncDFlashClient) -> None:
    """Wait until a server whose engine was killed answers again. Raises `TimeoutError`."""
    async with asyncio.timeout(RESTART_S):
        while True:
            try:
                await client.generate([7, 8, 9], max_tokens=1)
                return
            except ClientError:
                await asyncio.sleep(0.2)


async def blocks_in_use(servers: dict[str, TritonServer]) -> list[str]:
    """The servers that still use blocks once what a prefill server keeps has run out."""
    until = time.monotonic() + 2 * KEPT_S
    while True:
        usage = {
            name: MetricsPage.read(server.metrics_url).value("dflash:kv_cache_usage_perc")
            for name, server in servers.items()
        }
        if not any(usage.values()) or time.monotonic() > until:
            return [
                f"the {name} server still uses {100 * share:.1f} % of its blocks"
                for name, share in usage.items()
                if share
            ]
        await asyncio.sleep(0.5)


async def compare(servers: list[TritonServer], num_users: int, num_tokens: int, num_kills: int) -> list[str]:
    """What went wrong."""
    prefill, decode, alone = (AsyncDFlashClient(server.grpc_url) for server in servers)
    wrong: list[str] = []
    for client in (prefill, decode, alone):
        await ask(None, client, prompts(2, 64, 9), Round())
    asked = prompts(num_users, num_tokens, 3)
    one, two = Round(), Round()
    await ask(None, alone, asked, one)
    await ask(prefill, decode, asked, two)
    print(described("one server", one), described("a prefill and a decode server", two), sep="\n", flush=True)
    wrong += differences(two, one) + [f"prompt {n}: {error}" for n, error in (one.errors | two.errors).items()]
    fetched, expected = loaded_tokens(servers[1]), num_users * ((num_tokens - 1) // 16 * 16)
    print(f"{fetched} of {expected} prompt tokens were fetched")
    if fetched < expected:
        wrong.append(f"{fetched} prompt tokens were fetched, not {expected}")
    if abs(one.acceptance - two.acceptance) > MAX_ACCEPTANCE_DIFFERENCE:
        wrong.append(f"acceptance is {two.acceptance:.3f}, with one server {one.acceptance:.3f}")
    for name, server in (("prefill", servers[0]), ("decode", servers[1])):
        for number in range(num_kills):
            asked = prompts(min(num_users, 16), num_tokens, 100 + number)
            one, two = Round(), Round()
            await ask(None, alone, asked, one)
            running = asyncio.create_task(ask(prefill, decode, asked, two))
            await asyncio.sleep(0.2 + 0.1 * number)
            for pid in engine_pids(server.pid):
                os.kill(pid, signal.SIGKILL)
            await running
            print(f"{name} killed: {len(two.tokens)} answers, {len(two.errors)} errors", flush=True)
            wrong += differences(two, one)
            allowed = () if name == "prefill" else (Internal, Unavailable)
            wrong += [f"prompt {n}: {error!r}" for n, error in two.errors.items() if not isinstance(error, allowed)]
            await ready(prefill if server is servers[0] else decode)
    wrong += await blocks_in_use({"prefill": servers[0], "decode": servers[1]})
    for client in (prefill, decode, alone):
        await client.close()
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 where something went wrong, and 77 without nixl where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=64, help="prompts at the same time (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1500, help="of each prompt (%(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of each engine (%(default)s)")
    parser.add_argument("--backend", choices=("tcp", "nixl"), default="tcp", help="how KV moves (%(default)s)")
    given = parser.parse_args(arguments)
    if given.backend == "nixl" and importlib.util.find_spec("nixl") is None:
        print("skipped: nixl is not installed: pip install --no-deps nixl nixl-cu12")
        return SKIPPED
    common = {"max_model_len": "2048", "kv_cache_gb": "1", "kv_write_guard": "true", "adaptive_speculation": "false"}
    kept = {
        role: {"kv_role": role, "kv_transfer_backend": given.backend, "kv_transfer_timeout_s": str(KEPT_S)}
        for role in ("prefill", "decode")
    } | {"none": {"kv_role": "none"}}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(TritonServer(common | kept[role], host=HOST, http_port=0, grpc_port=0, metrics_port=0))
            for role in kept
        ]
        wrong = asyncio.run(compare(servers, given.users, given.tokens, given.kills))
    for each in wrong[:10]:
        print(f"WRONG {each}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
