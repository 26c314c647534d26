"""Clients that leave in mid-stream, that do not read, and that do not finish their requests: what they cost the others.

`python -m checks.abusive_clients --leavers 1000`. Meanwhile one well-behaved client with a key of its own asks the same
question again and again. The exit status is 0 when it always got its right answer, no request runs and no KV block is
in use afterwards, and memory is as it was after the first tenth of the leavers, but for `ALLOWED_MIB`.
`tests/server/test_front_end_abuse.py` runs it with fewer clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from checks.front_end import HOST, RunningFrontEnd, request_bytes, running_front_end

SETTINGS = {"max_num_seqs": "16", "max_model_len": "1024", "kv_cache_gb": "0.1"}
BODY_TIMEOUT_S = 5
ABUSER, OTHER = "abuser-key-0123456789", "other-key-0123456789"
OPTIONS = ["--no-access-log", "--body-timeout", str(BODY_TIMEOUT_S), "--write-timeout", "5"]
KEYS = f"abuser {ABUSER}\nother {OTHER}"
QUESTION = "What is 17 + 25?\n"
AT_ONCE = 32
PAUSE_S = 0.25
# When everything has been freed, at the latest.
SETTLE_S = 30.0
ALLOWED_MIB = 64.0
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 1, "stream": True}


@dataclass
class Outcome:
    """What was seen: times to first token of the well-behaved client, how the abusive ones were ended, memory by
    process before and after in MiB, what is left, and `surprises` in words."""

    first_token_s: list[float] = field(default_factory=list)
    num_closed: int = 0
    before_mib: dict[str, float] = field(default_factory=dict)
    after_mib: dict[str, float] = field(default_factory=dict)
    num_running: float = 0
    kv_usage: float = 0
    surprises: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether everything was as promised."""
        grown = any(self.after_mib[role] > self.before_mib[role] + ALLOWED_MIB for role in self.before_mib)
        return not (self.surprises or grown or self.num_running or self.kv_usage)

    def __str__(self) -> str:
        slowest = max(self.first_token_s, default=float("nan"))
        memory = ", ".join(f"{role} {mib:.0f} to {self.after_mib[role]:.0f}" for role, mib in self.before_mib.items())
        return (
            f"{len(self.first_token_s)} right answers meanwhile, first token within {slowest:.2f} s; {self.num_closed} "
            f"connections closed by the server; memory in MiB: {memory}; requests running {self.num_running:g}, KV "
            f"blocks in use {self.kv_usage:.1%}" + "".join(f"\n  {surprise}" for surprise in self.surprises)
        )


@asynccontextmanager
async def _observed(front_end: RunningFrontEnd) -> AsyncIterator[Outcome]:
    """A well-behaved client beside what happens inside; then memory and blocks once all is quiet."""
    _, answer = await front_end.first_token_s(QUESTION, OTHER, 16)
    outcome, done = Outcome(before_mib=front_end.memory_mib()), False

    async def ask() -> None:
        while not done:
            try:
                seconds, text = await front_end.first_token_s(QUESTION, OTHER, 16)
            except (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError) as error:
                outcome.surprises.append(f"the well-behaved client: {error!r}")
            else:
                outcome.first_token_s.append(seconds)
                if text != answer:
                    outcome.surprises.append(f"it got {text!r} and not {answer!r}")
            await asyncio.sleep(PAUSE_S)

    asking = asyncio.create_task(ask())
    try:
        yield outcome
    finally:
        done = True
        await asking
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        metrics = front_end.metrics
        outcome.num_running = metrics.value("dflash:num_requests_in_flight")
        outcome.kv_usage = metrics.value("dflash:kv_cache_usage_perc")
        if not (outcome.num_running or outcome.kv_usage):
            break
        await asyncio.sleep(PAUSE_S)
    outcome.after_mib = front_end.memory_mib()


async def _gather(tasks: Sequence[Coroutine[Any, Any, None]], at_once: int) -> None:
    limit = asyncio.Semaphore(at_once)

    async def one(task: Coroutine[Any, Any, None]) -> None:
        async with limit:
            await task

    await asyncio.gather(*(one(task) for task in tasks))


async def leavers(front_end: RunningFrontEnd, count: int) -> Outcome:
    """Clients that close their connection after the first event, half of them without a farewell."""

    failed: list[str] = []

    async def leave(number: int) -> None:
        reader, writer = await front_end.connect()
        try:
            writer.write(request_bytes("/v1/completions", {**LONG, "prompt": f"Count from {number}."}, ABUSER))
            while (line := await reader.readline()) and not line.startswith(b"data: "):
                pass
            if number % 2:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError as error:
            failed.append(f"client {number}: {error!r}")
        finally:
            writer.close()

    # Pools and caches fill before memory counts.
    warm_up = max(count // 10, AT_ONCE)
    await _gather([leave(number) for number in range(warm_up)], AT_ONCE)
    async with _observed(front_end) as outcome:
        await _gather([leave(number) for number in range(warm_up, count)], AT_ONCE)
    outcome.surprises += failed
    return outcome


async def slow_readers(front_end: RunningFrontEnd, count: int, seconds: float) -> Outcome:
    """Clients that ask for much and read nothing."""
    async with _observed(front_end) as outcome:
        writers = []
        for number in range(count):
            plain = socket.socket()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.setblocking(False)
            await asyncio.get_running_loop().sock_connect(plain, (HOST, front_end.port))
            body = {**LONG, "prompt": f"Count from {number}.", "logprobs": 20, "max_tokens": 400}
            await asyncio.get_running_loop().sock_sendall(plain, request_bytes("/v1/completions", body, ABUSER))
            writers.append(plain)
        await asyncio.sleep(seconds)
        for plain in writers:
            plain.close()
    return outcome


async def half_open(front_end: RunningFrontEnd, count: int) -> Outcome:
    """Connections on which a request begins and does not go on: nothing, half a header, half a body."""
    whole = request_bytes("/v1/completions", {**LONG, "prompt": "Count."}, ABUSER)
    beginnings = (b"", whole[:20], whole[:-5])

    async def hold(number: int) -> None:
        reader, writer = await front_end.connect()
        writer.write(beginnings[number % len(beginnings)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                outcome.num_closed += 1
        writer.close()

    async with _observed(front_end) as outcome:
        await asyncio.gather(*(hold(number) for number in range(count)))
    if outcome.num_closed < count:
        outcome.surprises.append(f"after {SETTLE_S:g} s {count - outcome.num_closed} connections are still open")
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the three kinds and print a line for each."""
    parser = argparse.ArgumentParser(description="What abusive clients of the OpenAI front end cost the others.")
    parser.add_argument("--leavers", type=int, default=1000, help="%(default)s")
    parser.add_argument("--slow", type=int, default=64, help="clients that do not read (%(default)s)")
    parser.add_argument("--half-open", type=int, default=600, help="%(default)s")
    given = parser.parse_args(arguments)
    kept = True
    with running_front_end(SETTINGS, OPTIONS, KEYS) as front_end:
        for name, kind in (
            (f"{given.leavers} clients that leave", leavers(front_end, given.leavers)),
            (f"{given.slow} slow readers", slow_readers(front_end, given.slow, 15)),
            (f"{given.half_open} half-open connections", half_open(front_end, given.half_open)),
        ):
            outcome = asyncio.run(kind)
            print(f"{name}: {outcome}", flush=True)
            kept = kept and outcome.kept
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
