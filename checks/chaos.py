"""Kills the engine process under load, over and over, and prints how the server comes through.

`python -m checks.chaos --rounds 20`. Each round streams 16 requests, kills the engine by its id once every one of
them has begun, and measures until when each stream has its INTERNAL error and when the same question gets its right
answer again. At the end it counts what is left over. The exit status is 0 when every bound below was kept.
`tests/server/test_supervision.py` runs the same rounds, fewer of them.

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

from checks.server_state import engine_pids
from dflash_cli.launcher.processes import Process, family
from dflash_cli.launcher.server import TritonServer
from dflash_cli.launcher.server_files import SEGMENT_PREFIX
from dflash_client import DFlashClient
from dflash_client.errors import ClientError, Internal, Unavailable

STREAMS = 16
# What the project promises: every stream has its error, and the next right answer is there, within these seconds.
INTERNAL_WITHIN_S = 5.0
READY_WITHIN_S = 15.0
GIVE_UP_S = 60.0
RETRY_S = 0.05
SETTINGS = {"max_num_seqs": str(STREAMS), "max_model_len": "1024", "kv_cache_gb": "0.1"}
QUESTION = "What is 17 + 25?"


@dataclass(frozen=True)
class Round:
    """What one kill led to. `internal_s`: seconds from the kill to each stream's INTERNAL. `right_answer_s`: seconds to
    the next answer, which was the right one; None if it was another or did not come. `surprises`: whatever else was
    seen, in words."""

    internal_s: list[float]
    right_answer_s: float | None
    num_unavailable: int
    surprises: list[str]

    @property
    def kept(self) -> bool:
        """Whether the promises were kept."""
        return (
            len(self.internal_s) == STREAMS
            and max(self.internal_s) < INTERNAL_WITHIN_S
            and self.right_answer_s is not None
            and self.right_answer_s < READY_WITHIN_S
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
        except Internal:
            self.internal_at = time.monotonic()
        except ClientError as error:
            self.surprise = f"stream {self.number}: {error.status}: {error}"
        self.begun.set()


def right_answer(client: DFlashClient) -> str:
    """The answer to the question that each round asks again."""
    return client.generate(QUESTION, temperature=0, max_tokens=24).text


def play(server: TritonServer, client: DFlashClient, answer: str) -> Round:
    """One round: streams, a kill, and the way back to `answer`."""
    streams = [_Stream(client, number) for number in range(STREAMS)]
    for stream in streams:
        stream.begun.wait(GIVE_UP_S)
    (engine,) = engine_pids(server.pid)
    os.kill(engine, signal.SIGKILL)
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
    return Round(internal_s, right_answer_s, num_unavailable, surprises)


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds and print a line for each."""
    parser = argparse.ArgumentParser(description="Kill the engine under load and measure how the server recovers.")
    parser.add_argument("--rounds", type=int, default=20, help="%(default)s")
    rounds = parser.parse_args(arguments).rounds
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        tempfile.tempdir = directory
        return 0 if _run(rounds, directory) else 1


def _run(rounds: int, directory: str) -> bool:
    count = LeftoverCount(directory)
    environ = os.environ | {"TMPDIR": directory}
    server = TritonServer(SETTINGS, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0, environ=environ)
    kept = True
    members: set[Process] = set()
    with server, DFlashClient(server.http_url, "http", timeout_s=GIVE_UP_S) as client:
        answer = right_answer(client)
        print(f"round  INTERNAL on {STREAMS} streams: first, last [s]  next right answer [s]  UNAVAILABLE meanwhile")
        for number in range(1, rounds + 1):
            members |= family(server.pid)
            result = play(server, client, answer)
            kept = kept and result.kept
            times = result.internal_s or [float("nan")]
            answered = "never" if result.right_answer_s is None else f"{result.right_answer_s:.2f}"
            print(
                f"{number:5}  {len(result.internal_s):2} of {STREAMS}: {min(times):.2f}, {max(times):.2f}"
                f"  {answered:>10}  {result.num_unavailable:10}",
                *result.surprises,
                flush=True,
            )
        members |= family(server.pid)
    left = count.since(members)
    print(f"left over: {len(left.processes)} processes, {len(left.segments)} segments in /dev/shm, ", end="")
    print(f"{len(left.files)} temporary files and folders" + (f": {left}" if left else ""))
    return kept and not left


if __name__ == "__main__":
    sys.exit(main())
