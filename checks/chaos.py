"""Kills the engine process under load, over and over, and prints how the server comes through.

`python -m checks.chaos --rounds 20`. Each round streams 16 requests, kills the engine by its id once every one of
them has begun, and measures until when each stream has its INTERNAL error and when the same question gets its right
answer again. At the end it counts what is left over. The exit status is 0 when every bound below was kept.
`--ranks 2` shares the target between processes and ends one after the other, the engine among them; `--stop` stops them
in place of killing them, which shows only once they have said nothing for a while. `tests/server/test_supervision.py`
runs the same rounds, fewer of them.

Over HTTP: Triton 2.51 itself dies, after some hundreds of them, of streams that end in an error when the client has
asked for real gRPC statuses (`triton_grpc_error`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from dflash_cli.launcher.leftovers import SEGMENT_PREFIX
from dflash_cli.launcher.processes import Process, family
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from dflash_client.errors import ClientError, Internal, Unavailable
from load_tests.server_state import engine_pids, processes_by_role

STREAMS = 16
# What the project promises: every stream has its error, and the next right answer is there, within these seconds.
INTERNAL_WITHIN_S = 5.0
READY_WITHIN_S = 15.0
# How long a process may say nothing: a rank, and the engine by its setting.
RANK_HANG_S = 11.0
ENGINE_HANG_S = 10.0
# How much longer an engine takes to start whose ranks start once it has read what they are to load.
RANKS_START_S = 10.0
GIVE_UP_S = 60.0
RETRY_S = 0.05
SETTINGS = {"max_num_seqs": str(STREAMS), "max_model_len": "1024", "kv_cache_gb": "0.1"}
QUESTION = "What is 17 + 25?"


@dataclass(frozen=True)
class Round:
    """What one kill led to. `internal_s`: seconds from the kill to each stream's INTERNAL. `right_answer_s`: seconds to
    the next answer, which was the right one; None if it was another or did not come. `surprises`: whatever else was
    seen, in words. victim: the process that was ended. noticed_within_s: how long its silence may go
    unnoticed. starts_later_s: how much longer the next engine may take to start than one process does. messages: those
    of the INTERNAL errors."""

    internal_s: list[float]
    right_answer_s: float | None
    num_unavailable: int
    surprises: list[str]
    victim: str = "engine"
    noticed_within_s: float = 0.0
    starts_later_s: float = 0.0
    messages: frozenset[str] = frozenset()

    @property
    def kept(self) -> bool:
        """Whether the promises were kept."""
        return (
            len(self.internal_s) == STREAMS
            and max(self.internal_s) < INTERNAL_WITHIN_S + self.noticed_within_s
            and self.right_answer_s is not None
            and self.right_answer_s < READY_WITHIN_S + self.noticed_within_s + self.starts_later_s
            and not self.surprises
        )


@dataclass(frozen=True)
class Leftovers:
    """What exists now and did not before, by name."""

    processes: list[int]
    segments: list[str]
    files: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.segments or self.files)


class LeftoverCount:
    """Remembers what is there now; `since` says what has been added. `directory` is the temporary directory of this
    process and of the server alone."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._segments, self._files = _segments(), set(os.listdir(directory))

    def since(self, processes: Iterable[Process]) -> Leftovers:
        """What is left over; of `processes` those that still run."""
        alive = [process.pid for process in processes if process in family(process.pid)]
        files = set(os.listdir(self._directory)) - self._files
        return Leftovers(sorted(alive), sorted(_segments() - self._segments), sorted(files))


def _segments() -> set[str]:
    """Shared memory, without that of the servers that other processes have started, and without the semaphores of
    Python's multiprocessing, which no part of a server uses and any other process may."""
    own = f"{SEGMENT_PREFIX}{os.getpid()}_"
    others = ("dflash_", "sem.mp-")
    return {name for name in os.listdir("/dev/shm") if name.startswith(own) or not any(map(name.__contains__, others))}


@dataclass
class _Stream:
    """One client with one long stream, in a thread of its own."""

    client: DFlashClient
    number: int
    begun: threading.Event = field(default_factory=threading.Event)
    internal_at: float | None = None
    message: str = ""
    surprise: str = ""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in self.client.stream(
                f"Count from {self.number} to a thousand.", temperature=0, max_tokens=900, ignore_eos=True
            ):
                self.begun.set()
            self.surprise = f"stream {self.number} ended as if nothing had happened"
        except Internal as error:
            self.internal_at = time.monotonic()
            self.message = str(error)
        except ClientError as error:
            self.surprise = f"stream {self.number}: {error.status}: {error}"
        self.begun.set()


def right_answer(client: DFlashClient) -> str:
    """The answer to the question that each round asks again."""
    return client.generate(QUESTION, temperature=0, max_tokens=24).text


@dataclass(frozen=True)
class Victim:
    """What is ended, and how: by itself a process. rank: 0 for the engine. The rest as of `Round`."""

    rank: int = 0
    number: signal.Signals = signal.SIGKILL
    noticed_within_s: float = 0.0
    starts_later_s: float = 0.0

    @property
    def name(self) -> str:
        """For the table of rounds."""
        return f"rank {self.rank}" if self.rank else "engine"

    def end(self, server_pid: int) -> None:
        """End it."""
        os.kill(self._pid(server_pid), self.number)

    def _pid(self, server_pid: int) -> int:
        """Its process. Ranks have started in their order."""
        if self.rank == 0:
            (engine,) = engine_pids(server_pid)
            return engine
        ranks = processes_by_role(server_pid)["rank"]
        return sorted(ranks, key=lambda process: (process.create_time(), process.pid))[self.rank - 1].pid


def play(server: TritonServer, client: DFlashClient, answer: str, victim: Victim | None = None) -> Round:
    """One round: streams, a kill, and the way back to `answer`. victim: by default the engine."""
    victim = victim or Victim()
    streams = [_Stream(client, number) for number in range(STREAMS)]
    for stream in streams:
        stream.begun.wait(GIVE_UP_S)
    victim.end(server.pid)
    killed_at = time.monotonic()
    surprises: list[str] = []
    num_unavailable, right_answer_s = 0, None
    while right_answer_s is None and time.monotonic() - killed_at < GIVE_UP_S:
        try:
            said = right_answer(client)
        except Unavailable:
            num_unavailable += 1
            time.sleep(RETRY_S)
        except Internal:
            # It was sent before the server had noticed.
            time.sleep(RETRY_S)
        else:
            if said != answer:
                surprises.append(f"the answer after the restart was {said!r} and not {answer!r}")
                break
            right_answer_s = time.monotonic() - killed_at
    for stream in streams:
        stream.thread.join(GIVE_UP_S)
    surprises += [stream.surprise for stream in streams if stream.surprise]
    internal_s = [stream.internal_at - killed_at for stream in streams if stream.internal_at is not None]
    messages = frozenset(stream.message for stream in streams if stream.internal_at is not None)
    bounds = victim.noticed_within_s, victim.starts_later_s
    return Round(internal_s, right_answer_s, num_unavailable, surprises, victim.name, *bounds, messages)


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a line for each."""
    parser = argparse.ArgumentParser(description="Kill the engine under load and measure how the server recovers.")
    parser.add_argument("--rounds", type=int, default=20, help="%(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the target (%(default)s)")
    parser.add_argument("--stop", action="store_true", help="stop a process (SIGSTOP) in place of killing it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        tempfile.tempdir = directory
        return 0 if _run(options.rounds, options.ranks, options.stop, directory) else 1


HEADING = f"round  ended   INTERNAL on {STREAMS} streams: first, last [s]  next right answer [s]  UNAVAILABLE then"


def line(number: int, result: Round) -> str:
    """A round's row under the heading."""
    times = result.internal_s or [float("nan")]
    answered = "never" if result.right_answer_s is None else f"{result.right_answer_s:.2f}"
    row = (
        f"{number:5}  {result.victim:6}  {len(result.internal_s):2} of {STREAMS}: {min(times):.2f}, {max(times):.2f}"
        f"  {answered:>10}  {result.num_unavailable:10}"
    )
    return " ".join([row, *result.surprises])


def victim_of(number: int, ranks: int, stop: bool) -> Victim:
    """Who is ended in round `number`, from 1: the last rank, the one before it, and so on to the engine."""
    rank = -number % ranks
    starts_later_s = RANKS_START_S if ranks > 1 else 0.0
    if not stop:
        return Victim(rank, starts_later_s=starts_later_s)
    return Victim(rank, signal.SIGSTOP, RANK_HANG_S if rank else ENGINE_HANG_S, starts_later_s)


def _run(rounds: int, ranks: int, stop: bool, directory: str) -> bool:
    settings = SETTINGS | {"tensor_parallel_size": str(ranks)}
    if stop:
        settings["engine_hang_timeout_s"] = f"{ENGINE_HANG_S:g}"
    count = LeftoverCount(directory)
    environ = os.environ | {"TMPDIR": directory}
    server = TritonServer(settings, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, environ=environ)
    kept = True
    members: set[Process] = set()
    with server, DFlashClient(server.http_url, "http", timeout_s=GIVE_UP_S) as client:
        answer = right_answer(client)
        print(HEADING)
        for number in range(1, rounds + 1):
            members |= family(server.pid)
            result = play(server, client, answer, victim_of(number, ranks, stop))
            kept = kept and result.kept
            print(line(number, result), flush=True)
        members |= family(server.pid)
    left = count.since(members)
    print(f"left over: {len(left.processes)} processes, {len(left.segments)} segments in /dev/shm, ", end="")
    print(f"{len(left.files)} temporary files and folders" + (f": {left}" if left else ""))
    return kept and not left


if __name__ == "__main__":
    sys.exit(main())
