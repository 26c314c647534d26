"""Requests that are costly to read: how long another client's short requests take meanwhile, against alone.

`python -m checks.parse_cost`. One client, in a process of its own, sends one such request after the other, with a pause
between them; another asks a short question again and again. Windows with and without the first take turns, so that both
see the same machine. The requests are as large as once stopped every stream for seconds, or as large as is still read
before it is refused. The exit status is 0 when with each of them the 99th percentile of the other client is at most
`ALLOWED_RATIO` times the idle one. It needs a quiet machine. With `--pause 0` the client sends as fast as it is
answered: then it, Triton, which copies gigabytes a second, and the model's process share the cores with the others.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from checks.wire import TIMEOUT_S, request
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient

ALLOWED_RATIO = 2.0
# Between two costly requests: each once took one to nine seconds, so that one in a quarter of a second is a flood.
PAUSE_S = 0.25
ASK_PAUSE_S = 0.02
# A window of this many seconds with the costly requests follows one as long without.
WINDOW_S = 2.5
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
VOCAB_SIZE = 1536
# Of the demo pair: as many characters as could be a prompt of `max_model_len` tokens.
PROMPT_CHARS = 53_000


def _nested() -> Any:
    lists = ",".join(["[" * 900 + "]" * 900] * 2000)
    return request(text_input="a", sampling_parameters=f'{{"max_tokens": 1, "triton_x": [{lists}]}}')


def _biases() -> Any:
    biases = ",".join(f'"{token_id:07d}": 1' for token_id in range(320_000))
    return request(text_input="a", sampling_parameters=f'{{"logit_bias": {{{biases}}}}}')


def _name() -> Any:
    return request(text_input="a", sampling_parameters=json.dumps({"x" * 3_900_000: 1}))


def _ids() -> Any:
    return request(input_ids=[300] * 8_000_000 + [-1])


def _widest_biases() -> Any:
    biases = {str(token_id): 1.5 for token_id in range(VOCAB_SIZE)}
    return request(text_input="a", sampling_parameters=json.dumps({"logit_bias": biases, "x": ["a"] * 4000}))


def _messages() -> Any:
    messages = [{"role": "user", "content": "a"}] * 2000
    return request(messages=json.dumps(messages))


def _prompt() -> Any:
    return request(text_input="".join(chr(97 + position * position % 26) for position in range(PROMPT_CHARS)))


# By name: what makes the request. Each must be refused.
ATTACKS: dict[str, Callable[[], Any]] = {
    "2,000 lists nested 900 deep, 3.6 MB": _nested,
    "320,000 token biases, 4.2 MB": _biases,
    "a parameter's name of 3.9 MB": _name,
    "8 million token ids, 64 MB": _ids,
    "a bias for every token and an unknown parameter": _widest_biases,
    "2,000 messages": _messages,
    "a prompt of as many characters as are tokenised": _prompt,
}


@dataclass
class Cost:
    """Seconds of the short requests alone and beside the costly ones, how many of those were sent, and their answer."""

    idle_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    num_sent: int = 0
    words: str = ""

    @property
    def ratio(self) -> float:
        """Of the 99th percentiles."""
        return p99(self.beside_s) / p99(self.idle_s)

    def misses(self) -> list[str]:
        """What was not as promised, in words."""
        if not self.words.startswith("INVALID_ARGUMENT: "):
            return [f"the costly request was not refused: {self.words[:200]!r}"]
        if self.ratio <= ALLOWED_RATIO:
            return []
        return [f"p99 beside them is {self.ratio:.2f} times the idle one; at most {ALLOWED_RATIO:g}"]

    def __str__(self) -> str:
        figures = (
            f"p50 {1000 * statistics.median(times):.0f}, p99 {1000 * p99(times):.0f}, longest {1000 * max(times):.0f}"
            for times in (self.idle_s, self.beside_s)
        )
        alone, beside = figures
        return (
            f"alone {alone} ms ({len(self.idle_s)}); beside {self.num_sent} of them {beside} ms "
            f"({len(self.beside_s)}): {self.ratio:.2f} times"
        )


def p99(times: Sequence[float]) -> float:
    """The 99th percentile: the smallest time that at most 1 % of them exceed."""
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def compute(commands: Connection) -> None:
    """What `attack` does, but that it keeps a core busy and sends nothing."""
    while True:
        try:
            commands.recv()
        except EOFError:
            return
        while not commands.poll():
            sum(range(10_000))
        commands.recv()
        commands.send((0, ""))


def attack(address: str, message: bytes, pause_s: float, commands: Connection) -> None:
    """Send `message` again and again between one command and the next, then tell how many were sent and the last
    answer. Ends when the pipe does."""
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        # Without a serializer the bytes go out as they are: what they cost is the server's, not this client's.
        call = channel.stream_stream(
            METHOD, response_deserializer=service_pb2.ModelStreamInferResponse.FromString, _registered_method=False
        )
        while True:
            try:
                commands.recv()
            except EOFError:
                return
            num_sent, words = 0, ""
            while not commands.poll(pause_s):
                for response in call(iter([message]), timeout=TIMEOUT_S):
                    words = response.error_message
                num_sent += 1
            commands.recv()
            commands.send((num_sent, words))


def measure(address: str, message: bytes | None, seconds: float, pause_s: float) -> Cost:
    """Windows of `WINDOW_S` in turn without and with the costly requests, `seconds` of each. Without a `message` a
    process that computes takes the place of the client that sends it."""
    cost = Cost()
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    if message is None:
        process = context.Process(target=compute, args=(theirs,), daemon=True)
    else:
        process = context.Process(target=attack, args=(address, message, pause_s, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        with DFlashClient(address) as client:
            _ask(client, 1.0)
            for _ in range(max(1, round(seconds / WINDOW_S))):
                cost.idle_s += _ask(client, WINDOW_S)
                commands.send("begin")
                cost.beside_s += _ask(client, WINDOW_S)
                commands.send("end")
                if not commands.poll(TIMEOUT_S):
                    raise TimeoutError(f"the server did not answer the costly request within {TIMEOUT_S:g} s")
                num_sent, cost.words = commands.recv()
                cost.num_sent += num_sent
    finally:
        commands.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
    return cost


def _ask(client: DFlashClient, seconds: float) -> list[float]:
    """Ask a short question again and again for so long; the seconds of each."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        client.generate("Hello", max_tokens=4, ignore_eos=True, temperature=0)
        times.append(time.monotonic() - started)
        time.sleep(ASK_PAUSE_S)
    return times


def main() -> int:
    """Measure each kind of request and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=15.0, help="with each, and as long without (%(default)s)")
    parser.add_argument(
        "--pause", type=float, default=PAUSE_S, help="seconds between the costly requests (%(default)s)"
    )
    args = parser.parse_args()
    missed = False
    with TritonServer(host="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as server:
        # What a busy core alone does to the others on this machine, for comparison.
        print(f"a process that computes: {measure(server.grpc_url, None, args.seconds, 0)}", flush=True)
        for name, make in ATTACKS.items():
            cost = measure(server.grpc_url, make().SerializeToString(), args.seconds, args.pause)
            found = cost.misses()
            missed = missed or bool(found)
            print("\n  ".join((f"{name}: {cost}", *found)), flush=True)
    if not missed:
        print("the bound holds")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
