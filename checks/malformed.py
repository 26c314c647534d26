"""Sends thousands of malformed requests over both protocols and checks that each gets a clear refusal and nothing else.

`python -m checks.malformed` starts a server of its own. Each malformed request must be answered with
INVALID_ARGUMENT, by 400 over HTTP, or with one of the sentences in which Triton itself refuses a tensor before a model
sees it; the metrics page must count as many INVALID_ARGUMENT as clients have got from the model, and no other error;
valid requests between them must get the answer that they get alone; and the memory of the server, its
stub and its engine may grow by less than 5 % after the warm-up. Exit status 1 when any of that fails.

A stream's errors are texts in its responses. Triton can end the stream with the error's status instead, when a client
sends the header `triton_grpc_error`; that is not used here, since the Triton that this was written with crashes of it.

HTTP bodies that Triton itself cannot read never come to the model: Triton answers them with 500 and a sentence about
the JSON. They are counted apart, and their sentences are checked.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import hypothesis
from hypothesis import HealthCheck, given, settings
from tritonclient.grpc import service_pb2_grpc

from benchmarks.progress import progress
from checks.malformed_requests import GRPC_REQUESTS, HTTP_BODIES
from checks.wire import TIMEOUT_S, request
from dflash_backend.text.request import VERBATIM_ERRORS
from dflash_cli.launcher.server import TritonServer
from dflash_client.grpc_messages import decode
from load_tests.server_state import MODEL, MetricsPage, memory_mib

THREADS = 4
VALID_EVERY = 20
MAX_GROWTH = 0.05
PROMPTS = ("Write a function that adds 3.", "Write a short list of things to pack.", "Tell me about rivers.")
VALID = {"max_tokens": 8, "temperature": 0}
# How Triton's HTTP front end words what its JSON reader cannot read.
TRITONS_OWN_500 = (
    "failed to parse the request JSON buffer",
    "Unable to parse",
    "attempt to ",
    "parameter key '",
)
# How Triton itself words what does not fit the model's declared inputs. All else is the model's to refuse.
TRITONS_OWN = re.compile(
    r"(\[request id: [^]]*\] )?("
    r"unexpected shape for input|unexpected inference input|inference input '\w+' data-type is|"
    r"unable to find data for input tensor|input byte size mismatch|incomplete string|"
    r"expected \d+ string elements|parameter '\w+' has invalid type|The schema can not convert input)"
)
# The stub brings the metrics page up to date once a second.
METRICS_S = 2.0
ERRORS = "dflash:request_errors_total"
TRACES = ("Traceback", "At:\n", ".py(", '.py", line')


@dataclass
class Report:
    """What came of the requests. `by_model`: refusals of the model, each of which the metrics page must count.
    `misses` says of each that went wrong what was sent and what came."""

    refused: Counter[str] = field(default_factory=Counter)
    by_model: int = 0
    tritons_own: int = 0
    valid: int = 0
    misses: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A summary for people."""
        parts = [f"{count} {status}" for status, count in sorted(self.refused.items())]
        lines = [f"refused: {', '.join(parts)}; by Triton's own JSON reader with HTTP 500: {self.tritons_own}"]
        lines.append(f"valid requests between them with the right answer: {self.valid}")
        lines += [f"MISS: {miss}" for miss in self.misses[:20]]
        return "\n".join(lines)


class Miss(AssertionError):
    """What was sent, and the answer, which is not the one that it must get."""


class Sender:
    """Sends requests to one server and checks the answers."""

    def __init__(self, grpc_url: str, http_url: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(grpc_url, options=options))
        self._http = httpx.Client(base_url=f"http://{http_url}", timeout=TIMEOUT_S, trust_env=False, verify=False)
        self._expected = {prompt: self._answer_over_grpc(prompt) for prompt in PROMPTS}
        self._numbers = itertools.count()
        self.report = Report()
        self._lock = threading.Lock()

    def send_many(self, count: int, seed: int, on_sent: Callable[[], None]) -> None:
        """Send `count` malformed requests, and valid ones between them. After a miss Hypothesis looks for the smallest
        request that is one, and the rest is not sent."""

        @hypothesis.seed(seed)
        @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(GRPC_REQUESTS | HTTP_BODIES)
        def send(malformed: Any) -> None:
            if next(self._numbers) % VALID_EVERY == 0:
                self._send_valid()
            self._send_http(malformed) if isinstance(malformed, bytes) else self._send_grpc(malformed)
            on_sent()

        try:
            send()
        except Miss as miss:
            with self._lock:
                self.report.misses.append(str(miss))

    def _send_grpc(self, message: Any) -> None:
        responses = list(self._stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S))
        words = "".join(response.error_message for response in responses)
        self._check("over gRPC", bool(words), words, str(message))

    def _send_http(self, body: bytes) -> None:
        response = self._http.post(f"/v2/models/{MODEL}/generate", content=body)
        if response.status_code == 500 and _error_of(response).startswith(TRITONS_OWN_500):
            with self._lock:
                self.report.tritons_own += 1
            return
        status = response.status_code
        self._check(f"HTTP {status}", status == 400, _error_of(response), str(body))

    def _check(self, status: str, refused: bool, words: str, sent: str) -> None:
        """Take an answer: it must be a refusal, in words of the model that name the client's mistake or in Triton's."""
        by_model = words.startswith("INVALID_ARGUMENT: ") or words in VERBATIM_ERRORS
        with self._lock:
            self.report.refused[status if refused else f"not refused {status}"] += 1
            self.report.by_model += by_model
        known = by_model or TRITONS_OWN.match(words)
        if not refused or not known or any(trace in words for trace in TRACES):
            raise Miss(f"{status} {words[:300]!r} to {sent[:300]!r}")

    def _send_valid(self) -> None:
        prompt = random.choice(PROMPTS)
        if random.random() < 0.5:
            text = self._answer_over_grpc(prompt)
        else:
            body = {"text_input": prompt, "exclude_input_in_output": True, **VALID}
            text = self._http.post(f"/v2/models/{MODEL}/generate", json=body).json().get("text_output")
        if text != self._expected[prompt]:
            raise Miss(f"a valid request got {text!r} in place of {self._expected[prompt]!r}")
        with self._lock:
            self.report.valid += 1

    def _answer_over_grpc(self, prompt: str) -> str:
        message = request(VALID, text_input=prompt, exclude_input_in_output=True)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S)
        return "".join(decode(response)["text_output"][0] for response in call)


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json().get("error", ""))
    except ValueError:
        return response.text


def run(grpc_url: str, http_url: str, metrics_url: str, count: int, seed: int) -> Report:
    """Send `count` malformed requests over both protocols, a few at a time. The server must get no others."""
    time.sleep(METRICS_S)
    before = MetricsPage.read(metrics_url).by(ERRORS, "status")
    sender = Sender(grpc_url, http_url)
    so_far, sent = progress("malformed requests"), itertools.count(1)
    shares = [count // THREADS + (thread < count % THREADS) for thread in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [
            pool.submit(sender.send_many, share, seed + thread, lambda: so_far.step(min(next(sent), count), count))
            for thread, share in enumerate(shares)
        ]
    for future in futures:
        future.result()
    time.sleep(METRICS_S)
    after = MetricsPage.read(metrics_url).by(ERRORS, "status")
    counted = {status: count - before.get(status, 0) for status, count in after.items() if count != before.get(status)}
    report = sender.report
    if counted != {"INVALID_ARGUMENT": report.by_model}:
        report.misses.append(f"the metrics page counted {counted}, and clients got {report.by_model} INVALID_ARGUMENT")
    return report


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Send malformed requests to a server of its own.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=2_000, help="malformed requests before memory is measured")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    server_settings = {"max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.1"}
    with TritonServer(server_settings, http_port=0, grpc_port=0, metrics_port=0) as server:
        urls = (server.grpc_url, server.http_url, server.metrics_url)
        run(*urls, args.warm_up, args.seed)
        before, started = memory_mib(server.pid), time.monotonic()
        report = run(*urls, args.requests, args.seed + THREADS)
        seconds, after = time.monotonic() - started, memory_mib(server.pid)
    print(f"{args.requests} malformed requests in {seconds:.0f} s, seed {args.seed}")
    print(report.text())
    grown = {name: after[name] / before[name] - 1 for name in before}
    for name, growth in grown.items():
        print(f"memory of the {name}: {before[name]:.1f} MiB before, {after[name]:.1f} MiB after ({growth:+.2%})")
    return int(bool(report.misses) or max(grown.values()) >= MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
