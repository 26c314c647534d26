"""Sends thousands of malformed requests over both protocols and checks that nothing but a clear refusal comes of them.

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
import json
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
from tritonclient.grpc import service_pb2_grpc

from benchmarks.progress import progress
from checks.wire import MODEL, TIMEOUT_S, MetricsPage, add, memory_mb, packed, request
from dflash_backend.text.request import VERBATIM_ERRORS
from dflash_cli.launcher.server import TritonServer
from dflash_client.grpc_messages import decode

THREADS = 4
VALID_EVERY = 20
MAX_GROWTH = 0.05
PROMPTS = ("What is 2 + 3?", "Write a short list of things to pack.", "Tell me about rivers.")
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

BAD_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, "abc", 2.5, True, "1e400", "9" * 5000),
    "min_tokens": (-1, "x", 10**17),
    "temperature": (-0.1, "hot", "nan", "inf", "1e999"),
    "top_p": (0, 1.1, "-1", "all"),
    "top_k": (-2, "x", 0.5),
    "min_p": (-0.1, 1.5, "x"),
    "seed": ("x", str(2**64), "1_0", " 7", "\uff11", 1.5),
    "n": (0, -3, 65, "two", 10**15),
    "presence_penalty": (2.1, -2.1, "x"),
    "frequency_penalty": (3, "x"),
    "repetition_penalty": (0, -1, "1e-38", 101, "x"),
    "logprobs": (-1, 21, "x"),
    "logit_bias": ("x", "[]", '{"a": 1}', '{"1": "x"}', '{"99999999": 1}', '{"-1": 1}', "[" * 5000),
    "stop": ("", "[1]", '[""]', json.dumps(["x"] * 65), "y" * 1025, '["\\ud800"]'),
    "stop_token_ids": ("x", "[-1]", "[99999999]", '["a"]', json.dumps([1] * 1025)),
    "ignore_eos": ("maybe", 2),
    "include_stop_str_in_output": ("x", 7),
    "skip_special_tokens": ("x", -1),
    "num_speculative_tokens": (-1, 999, "x"),
    "cache_salt": (5, "s" * 2000),
    "max_token": (5,),
    "lora_name": ("doll",),
    "best_of": (2,),
    "use_beam_search": (True,),
    "detokenize": (False,),
    "prompt_logprobs": (1,),
    "structured_outputs": ('{"choice": ["a"]}',),
    "\u202e\0": ("x",),
}
NESTED: tuple[Any, ...] = ([], {}, [[1]], {"a": {"b": []}}, None)
BAD_JSON = (
    "{",
    "[1]",
    "5",
    '"x"',
    "null",
    "",
    "[" * 100_000,
    '{"a":' * 3000,
    '{"seed": NaN}',
    '{"seed": 1, "seed": 2}',
)
BAD_MESSAGES = (
    "hello",
    "[]",
    "{}",
    '["hi"]',
    '[{"role": "user"}]',
    '[{"role": 5, "content": "x"}]',
    '[{"role": "user", "content": null}]',
    '[{"role": "user", "content": 5}]',
    '[{"role": "user", "content": {"a": [1]}}]',
    '[{"role": "user", "content": "\\ud83d"}]',
    "[" * 900 + "]" * 900,
    "[" * 100_000,
)


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


def bad_parameter(rng: random.Random) -> tuple[str, Any]:
    """A sampling parameter that must be refused."""
    name = rng.choice(list(BAD_PARAMETERS))
    return name, rng.choice(BAD_PARAMETERS[name])


def bad_grpc(rng: random.Random) -> Any:
    """A `ModelInferRequest` that must be refused."""
    return rng.choice(_GRPC_KINDS)(rng)


def _grpc_parameter(rng: random.Random) -> Any:
    name, value = bad_parameter(rng)
    return request({name: value}, text_input="a")


def _grpc_parameter_input(rng: random.Random) -> Any:
    name, value = bad_parameter(rng)
    if rng.random() < 0.3:
        name, value = rng.choice(["max_tokens", "temperature", "top_k", "seed"]), rng.choice(NESTED[:-1])
    return request(text_input="a", sampling_parameters=json.dumps({name: value}))


def _grpc_json(rng: random.Random) -> Any:
    return request(text_input="a", sampling_parameters=rng.choice(BAD_JSON))


def _grpc_messages(rng: random.Random) -> Any:
    return request(messages=rng.choice(BAD_MESSAGES))


def _grpc_bytes(rng: random.Random) -> Any:
    """Text that is no UTF-8."""
    garbage = rng.randbytes(rng.randint(0, 30)) + b"\xff"
    name = rng.choice(["text_input", "messages", "sampling_parameters"])
    inputs: dict[str, Any] = {"text_input": b"a"} if name == "sampling_parameters" else {}
    return request(None, **inputs, **{name: garbage})


def _grpc_prompt(rng: random.Random) -> Any:
    """No prompt, two of them, an empty or a too long one, or ids that are no tokens."""
    two = {"text_input": "a", "messages": '[{"role": "user", "content": "a"}]', "input_ids": [1]}
    dropped = rng.choice(list(two))
    wrong: list[dict[str, Any]] = [
        {},
        {name: value for name, value in two.items() if name != dropped},
        {"text_input": ""},
        {"input_ids": []},
        {"text_input": "word " * rng.randint(3000, 50_000)},
        {"input_ids": [5] * rng.randint(1024, 5000)},
        {"input_ids": [1, rng.choice([-1, 2**31, 10**12, -(2**63)])]},
        {"text_input": "a", "stream": True, "exclude_input_in_output": False},
    ]
    return request(**rng.choice(wrong))


def _grpc_type(rng: random.Random) -> Any:
    """A tensor of another type than the model declares."""
    name, right = rng.choice(
        [("text_input", "BYTES"), ("stream", "BOOL"), ("input_ids", "INT64"), ("messages", "BYTES")]
    )
    sizes = {"INT32": 4, "FP32": 4, "UINT8": 1, "INT64": 8, "BOOL": 1}
    datatype = rng.choice([kind for kind in sizes if kind != right])
    message = request() if name in ("text_input", "input_ids", "messages") else request(text_input="a")
    add(message, name, datatype, [1], bytes(sizes[datatype]))
    return message


def _grpc_shape(rng: random.Random) -> Any:
    """A tensor of another shape than the model declares."""
    count = rng.randint(2, 5)
    name = rng.choice(["text_input", "stream", "sampling_parameters"])
    shape = rng.choice([[count], [1, count], [count, 1], [1, 1]])
    elements = max(shape) if len(shape) == 1 else shape[0] * shape[1]
    message = request() if name == "text_input" else request(text_input="a")
    data = bytes(elements) if name == "stream" else packed(*["{}"] * elements)
    add(message, name, "BOOL" if name == "stream" else "BYTES", shape, data)
    return message


def _grpc_contents(rng: random.Random) -> Any:
    """Data that does not fit the shape it comes with."""
    message = request()
    kind = rng.randrange(4)
    if kind == 0:
        add(message, "text_input", "BYTES", [1], rng.randbytes(rng.randint(0, 3)))
    elif kind == 1:
        add(message, "text_input", "BYTES", [1], b"\xff\xff\xff\x7fabc")
    elif kind == 2:
        add(message, "input_ids", "INT64", [rng.randint(2, 9)], bytes(8))
    else:
        message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    return message


def _grpc_unknown(rng: random.Random) -> Any:
    message = request(text_input="a")
    add(message, rng.choice(["image", "prompt", "embedding_request", ""]), "BYTES", [1], packed("x"))
    return message


_GRPC_KINDS: tuple[Callable[[random.Random], Any], ...] = (
    _grpc_parameter,
    _grpc_parameter_input,
    _grpc_json,
    _grpc_messages,
    _grpc_bytes,
    _grpc_prompt,
    _grpc_type,
    _grpc_shape,
    _grpc_contents,
    _grpc_unknown,
)


def bad_http(rng: random.Random) -> bytes:
    """A body for `generate` that must be refused."""
    kind = rng.randrange(7)
    if kind == 0:
        name, value = bad_parameter(rng)
        body: dict[str, Any] = {"text_input": "a", name: value}
    elif kind == 1:
        body = {"text_input": "a", rng.choice(["max_tokens", "seed", "stop", "anything"]): rng.choice(NESTED)}
    elif kind == 2:
        whole = json.dumps({"text_input": "a b c", "max_tokens": 3}).encode()
        return whole[: rng.randrange(len(whole))]
    elif kind == 3:
        body = {"text_input": "a", "sampling_parameters": rng.choice(BAD_JSON)}
    elif kind == 4:
        body = {"messages": rng.choice(BAD_MESSAGES)}
    elif kind == 5:
        wrong = rng.choice([5, None, True, ["a", "b"], {"a": 1}, 1.5])
        body = {"text_input": "a", rng.choice(["text_input", "messages", "sampling_parameters"]): wrong}
    else:
        raw = rng.randbytes(rng.randint(1, 20)) + b"\xff"
        return b'{"text_input": "' + raw.replace(b'"', b"x").replace(b"\\", b"x") + b'"}'
    return json.dumps(body).encode()


class Sender:
    """Sends requests to one server and judges the answers."""

    def __init__(self, grpc_url: str, http_url: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(grpc_url, options=options))
        self._http = httpx.Client(base_url=f"http://{http_url}", timeout=TIMEOUT_S, trust_env=False)
        self._expected = {prompt: self._answer_over_grpc(prompt) for prompt in PROMPTS}
        self.report = Report()
        self._lock = threading.Lock()

    def send(self, seed: int) -> None:
        """Send the malformed request of this seed, and now and then a valid one."""
        rng = random.Random(seed)
        if seed % VALID_EVERY == 0:
            self._send_valid(rng)
        if rng.random() < 0.5:
            self._send_grpc(bad_grpc(rng))
        else:
            self._send_http(bad_http(rng))

    def _send_grpc(self, message: Any) -> None:
        responses = list(self._stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S))
        words = "".join(response.error_message for response in responses)
        self._judge("over gRPC", bool(words), words, str(message))

    def _send_http(self, body: bytes) -> None:
        response = self._http.post(f"/v2/models/{MODEL}/generate", content=body)
        if response.status_code == 500 and _error_of(response).startswith(TRITONS_OWN_500):
            with self._lock:
                self.report.tritons_own += 1
            return
        status = response.status_code
        self._judge(f"HTTP {status}", status == 400, _error_of(response), str(body))

    def _judge(self, status: str, refused: bool, words: str, sent: str) -> None:
        """Take an answer: it must be a refusal, in words of the model that name the client's mistake or in Triton's."""
        by_model = words.startswith("INVALID_ARGUMENT: ") or words in VERBATIM_ERRORS
        with self._lock:
            self.report.refused[status if refused else f"not refused {status}"] += 1
            self.report.by_model += by_model
        known = by_model or TRITONS_OWN.match(words)
        if not refused or not known or any(trace in words for trace in TRACES):
            self.report.misses.append(f"{status} {words[:300]!r} to {sent[:300]!r}")

    def _send_valid(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        if rng.random() < 0.5:
            text = self._answer_over_grpc(prompt)
        else:
            body = {"text_input": prompt, "exclude_input_in_output": True, **VALID}
            text = self._http.post(f"/v2/models/{MODEL}/generate", json=body).json().get("text_output")
        if text == self._expected[prompt]:
            self.report.valid += 1
        else:
            self.report.misses.append(f"a valid request got {text!r} in place of {self._expected[prompt]!r}")

    def _answer_over_grpc(self, prompt: str) -> str:
        message = request(VALID, text_input=prompt, exclude_input_in_output=True)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_S)
        return "".join(decode(response)["text_output"][0] for response in call)


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json().get("error", ""))
    except ValueError:
        return response.text


def run(grpc_url: str, http_url: str, metrics_url: str, seeds: range) -> Report:
    """Send the malformed requests of these seeds over both protocols, a few at a time. Nobody else may send any."""
    time.sleep(METRICS_S)
    before = MetricsPage(metrics_url).by(ERRORS, "status")
    sender = Sender(grpc_url, http_url)
    with ThreadPoolExecutor(THREADS) as pool:
        so_far = progress("malformed requests")
        for done, _ in enumerate(pool.map(sender.send, seeds), 1):
            so_far.step(done, len(seeds))
    time.sleep(METRICS_S)
    after = MetricsPage(metrics_url).by(ERRORS, "status")
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
    settings = {"max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.1"}
    with TritonServer(settings, http_port=0, grpc_port=0, metrics_port=0) as server:
        first = args.seed + args.warm_up
        urls = (server.grpc_url, server.http_url, server.metrics_url)
        run(*urls, range(args.seed, first))
        before, started = memory_mb(server.pid), time.monotonic()
        report = run(*urls, range(first, first + args.requests))
        seconds, after = time.monotonic() - started, memory_mb(server.pid)
    print(f"{args.requests} malformed requests in {seconds:.0f} s, seeds from {first}")
    print(report.text())
    grown = {name: after[name] / before[name] - 1 for name in before}
    for name, growth in grown.items():
        print(f"memory of the {name}: {before[name]:.1f} MB before, {after[name]:.1f} MB after ({growth:+.2%})")
    return int(bool(report.misses) or max(grown.values()) >= MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
