"""Two servers behind NVIDIA Dynamo's frontend: answers stream, and a request goes where its prefix is cached.

`python -m checks.dynamo` starts two servers that publish KV events, a Dynamo worker for each and Dynamo's frontend with
its KV-aware router, which find each other through files: no etcd, no NATS. It needs `ai-dynamo` (the extra `dynamo`, or
`ai-dynamo`, `ai-dynamo-runtime` and `uvloop` with `--no-deps` in a folder that PYTHONPATH names). Some prompts are
asked, then several times again with other questions behind them. The exit status is 0 when every later request came to
the server that had its prompt, and 2 where Dynamo is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec

from dflash_cli.launcher.server import TritonServer
from load_tests.server_state import MetricsPage

MODEL = "demo"
WORDS = ("river", "stone", "market", "engine", "winter", "garden", "letter", "bridge", "copper", "window", "forest")
NUM_WORDS, NUM_TOKENS = 150, 48
QUESTION = "Sam fills {} bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?\n"
START_S, END_S, POLL_S = 180.0, 20.0, 0.5
# After an answer: until the server's counters and the router's blocks have it.
SETTLE_S = 1.5
# Of the prompt tokens of later requests. What is not cached is the question and the block that it begins in.
LEAST_CACHED = 0.85


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def program(name: str, args: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module that runs meanwhile, its output in `folder`. Raises `RuntimeError` when it ended by itself. Its
    last output is shown when it, or what was waited for, failed."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        environ = os.environ | {"DYN_FILE_KV": str(folder / "discovery")}
        command = [sys.executable, "-m", *args]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )
        try:
            yield process
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended")
        except (RuntimeError, TimeoutError):
            output_so_far = log.read_text(errors="replace")
            print(f"{name} (exit status {process.poll()}): {output_so_far[-2000:]}", file=sys.stderr)
            raise
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(END_S)
                    except subprocess.TimeoutExpired:
                        continue


def wait_until(what: str, condition: Callable[[], bool], programs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raises `TimeoutError`, or `RuntimeError` when one of the programs has ended."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if any(program.poll() is not None for program in programs):
            raise RuntimeError(f"{what} was not there when a program ended")
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(POLL_S)
    raise TimeoutError(f"{what} was not there within {START_S:g} s")


class Fleet:
    """The servers behind one address, `http://host:port`."""

    def __init__(self, address: str, servers: Sequence[TritonServer]) -> None:
        self._address = address
        self._servers = servers

    def knows_model(self) -> bool:
        """Whether the frontend has found a worker."""
        return MODEL in httpx.get(f"{self._address}/v1/models", timeout=10, trust_env=False).text

    def ask(self, prompt: str) -> int:
        """Stream an answer; how many parts had text. Raises `httpx.HTTPError`."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        parts = 0
        with httpx.stream("POST", f"{self._address}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            if answer.is_error:
                answer.read()
                raise RuntimeError(f"Dynamo answered {answer.status_code}: {answer.text[:500]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = msgspec.json.decode(line[6:]).get("choices")
                    parts += bool(choices and choices[0].get("text"))
        time.sleep(SETTLE_S)
        return parts

    def counts(self, name: str) -> list[float]:
        """A counter of each server."""
        return [MetricsPage.read(server.metrics_url).value(name) for server in self._servers]

    def asked(self, prompt: str) -> tuple[int, int]:
        """Ask; which server it came to, and how many parts the answer had."""
        before = self.counts("dflash:prompt_tokens_total")
        parts = self.ask(prompt)
        more = [after - one for after, one in zip(self.counts("dflash:prompt_tokens_total"), before, strict=True)]
        return more.index(max(more)), parts


def measure(fleet: Fleet, num_prompts: int, repeats: int) -> list[str]:
    """Ask and print; what is missed, a sentence each."""
    rng = random.Random(3)
    prompts = [" ".join(rng.choices(WORDS, k=NUM_WORDS)) for _ in range(num_prompts)]
    first = [fleet.asked(f"{prompt}. {QUESTION.format(2)}") for prompt in prompts]
    chosen, fewest_parts = [place for place, _ in first], min(parts for _, parts in first)
    names = ("dflash:prompt_tokens_total", "dflash:prefix_cache_hits_total")
    before = [sum(fleet.counts(name)) for name in names]
    found = 0
    for number in range(repeats):
        for prompt, place in zip(prompts, chosen, strict=True):
            found += fleet.asked(f"{prompt}. {QUESTION.format(3 + number)}")[0] == place
    tokens, cached = (sum(fleet.counts(name)) - one for name, one in zip(names, before, strict=True))
    total = num_prompts * repeats
    print(f"{num_prompts} prompts went to servers {chosen}; answers came in {fewest_parts} parts or more")
    print(f"{found} of {total} later requests came to the server of their prefix")
    print(f"{cached:.0f} of their {tokens:.0f} prompt tokens were cached ({cached / tokens:.1%})")
    misses = []
    if len(set(chosen)) < len(fleet.counts(names[0])):
        misses.append("a server had no prompt, so nothing was shown")
    if fewest_parts < 2:
        misses.append("an answer did not stream")
    if found < total:
        misses.append(f"{total - found} requests came to a server that did not have their prefix")
    if cached < LEAST_CACHED * tokens:
        misses.append(f"less than {LEAST_CACHED:.0%} of the prompt tokens were cached")
    return misses


def main() -> int:
    """Start all, measure, print and end all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=6, help="that are asked first (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="later requests with each (%(default)s)")
    args = parser.parse_args()
    if importlib.util.find_spec("dynamo") is None:
        print("ai-dynamo is not installed: pip install -e '.[dynamo]', or see docs/scale.md", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for _ in range(2):
            settings = {"kv_events_endpoint": f"tcp://127.0.0.1:{free_port()}", "kv_cache_gb": "0.1"}
            server = TritonServer(settings, host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
            servers.append(stack.enter_context(server))
        files = ("--discovery-backend", "file")
        programs = []
        for number, server in enumerate(servers):
            worker = ["dflash_cli.main", "dynamo", "--triton", server.grpc_url, "--served-model-name", MODEL, *files]
            programs.append(stack.enter_context(program(f"worker{number}", worker, folder)))
        port = free_port()
        router = ["dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", str(port)]
        programs.append(stack.enter_context(program("frontend", [*router, *files], folder)))
        fleet = Fleet(f"http://127.0.0.1:{port}", servers)
        wait_until("the model at Dynamo's frontend", fleet.knows_model, programs)
        time.sleep(2 * SETTLE_S)  # the second worker
        misses = measure(fleet, args.prompts, args.repeats)
    print("\n".join(misses) or "every bound was kept")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
