"""Sends requests with random parameters all at once, drops many of them midway, and checks that no other one notices.

`python -m checks.mixed` starts a server of its own. First every request is answered alone: these are the expected
answers, and the counters on the metrics page must equal what the client counted. Then all are sent at once, and 200 of
them are cancelled (gRPC) or disconnected (HTTP, streaming) at a random moment. Every other one must get its answer
token for token; one second later nothing may run or wait, and no KV block may be in use. Exit status 1 when any of that
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2_grpc

from benchmarks.progress import progress
from checks.wire import TIMEOUT_S, request
from dflash_cli.launcher.server import TritonServer
from dflash_client.grpc_messages import decode
from load_tests.server_state import MODEL, MetricsPage

# How long the server has to settle: a second, and one more since the metrics page is brought up to date once a second.
SETTLE_S = 2.0
# How long requests whose clients have gone may run on.
LONGEST_SETTLE_S = 30.0
# Moments at which a client goes away, in seconds after it has sent its request: at most this, and at most so much for
# each request, since few are answered sooner.
LATEST_DROP_S, LATEST_DROP_OF_EACH_S = 2.0, 0.01
LONGEST, LONGEST_DROPPED = 40, 400
# The share of the clients that go away which must still have been waiting when they did.
LEAST_DROPPED = 0.5
WORDS = ("river", "apple", "seven", "write", "explain", "code", "list", "short", "why", "tall", "green", "number")
FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens", "token_ids", "spec_stats", "logprobs")


@dataclass(frozen=True)
class Case:
    """One request. `drop_s`: when its client goes away, if it does."""

    prompt: str
    parameters: dict[str, Any]
    stream: bool
    over_http: bool
    drop_s: float | None

    @classmethod
    def draw(cls, rng: random.Random, latest_drop_s: float | None) -> Case:
        """A random request; the seed is always given, so that its answer is settled. latest_drop_s: when its client
        goes away at the latest; None: it stays."""
        dropped = latest_drop_s is not None
        parameters: dict[str, Any] = {
            "max_tokens": rng.randint(LONGEST_DROPPED // 2, LONGEST_DROPPED) if dropped else rng.randint(1, LONGEST),
            "temperature": rng.choice([0, 0, 0.7, 1.0, 1.5]),
            "seed": rng.randrange(10**9),
        }
        options: dict[str, Any] = {
            "n": rng.randint(2, 3),
            "top_k": rng.choice([5, 50]),
            "top_p": rng.choice([0.5, 0.9]),
            "min_p": 0.05,
            "min_tokens": rng.randint(0, parameters["max_tokens"]),
            "stop": json.dumps(rng.sample([" the", "a", ".", "er", "\n"], 2)),
            "ignore_eos": True,
            "presence_penalty": rng.choice([-0.5, 0.8]),
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "logit_bias": json.dumps({str(rng.randrange(3, 900)): rng.choice([-5, 2])}),
            "logprobs": rng.randint(0, 3),
            "num_speculative_tokens": rng.choice([0, 3, 7]),
            "include_stop_str_in_output": True,
            "cache_salt": rng.choice(["red", "blue"]),
        }
        parameters |= {name: options[name] for name in rng.sample(list(options), rng.randint(0, 5))}
        if dropped:
            parameters["ignore_eos"] = True
        # Prefixes in common, so that the cache has hits.
        prompt = " ".join([*WORDS[: rng.randrange(len(WORDS))], *rng.choices(WORDS, k=rng.randint(1, 30))])
        drop_s = None if latest_drop_s is None else rng.uniform(0, latest_drop_s)
        stream, over_http = rng.random() < 0.6, rng.random() < 0.4
        # Triton notices that an HTTP client is gone when it writes to it, so a request for one response at the end runs
        # on to its end.
        return cls(prompt, parameters, stream or (dropped and over_http), over_http, drop_s)

    def alone(self) -> Case:
        """The request for a client that stays; one that would have gone away asks for less."""
        if self.drop_s is None:
            return self
        shorter = {
            name: min(value, LONGEST) if name in ("max_tokens", "min_tokens") else value
            for name, value in self.parameters.items()
        }
        return replace(self, parameters=shorter, drop_s=None)


@dataclass
class Answer:
    """What a request got: of each completion the text, the token ids and the reason, and the statistics."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    num_input_tokens: int = 0
    error: str = ""

    def add(self, response: Mapping[str, list[Any]]) -> None:
        """Take a response's outputs."""
        texts = response["text_output"]
        if not self.texts:
            self.texts, self.token_ids = [""] * len(texts), [[] for _ in texts]
        start = 0
        for index, (text, count) in enumerate(zip(texts, response["num_output_tokens"], strict=True)):
            self.texts[index] += text
            self.token_ids[index] += response["token_ids"][start : start + count]
            start += count
        self.reasons = response["finish_reason"]
        self.num_input_tokens = response["num_input_tokens"][0]
        self.stats = [json.loads(stats) for stats in response.get("spec_stats", [])]

    @property
    def said(self) -> tuple[list[str], list[list[int]], list[str], str]:
        """What must not depend on the company."""
        return self.texts, self.token_ids, self.reasons, self.error


class Client:
    """Sends cases to one server, over whichever protocol each wants."""

    def __init__(self, grpc_url: str, http_url: str) -> None:
        self._channel = grpc.aio.insecure_channel(grpc_url, options=[("grpc.enable_http_proxy", 0)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"http://{http_url}", timeout=TIMEOUT_S, trust_env=False, verify=False, limits=limits
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        await self._channel.close()

    async def send(self, case: Case) -> Answer | None:
        """The answer, or None when the client went away before it was complete."""
        work = self._over_http(case) if case.over_http else self._over_grpc(case)
        try:
            return await asyncio.wait_for(work, case.drop_s)
        except TimeoutError:
            return None

    async def _over_grpc(self, case: Case) -> Answer:
        answer = Answer()
        inputs: dict[str, Any] = {f"return_{name}": True for name in FLAGS}
        message = request(
            None,
            text_input=case.prompt,
            stream=case.stream,
            exclude_input_in_output=True,
            sampling_parameters=json.dumps(case.parameters),
            **inputs,
        )
        call = self._stub.ModelStreamInfer(_once(message), timeout=TIMEOUT_S)
        try:
            async for response in call:
                answer.error += response.error_message
                if response.infer_response.outputs:
                    answer.add(decode(response))
        finally:
            call.cancel()
        return answer

    async def _over_http(self, case: Case) -> Answer:
        answer = Answer()
        body = {
            "text_input": case.prompt,
            "stream": case.stream,
            "exclude_input_in_output": True,
            **{f"return_{name}": True for name in FLAGS},
            **case.parameters,
        }
        path = f"/v2/models/{MODEL}/{'generate_stream' if case.stream else 'generate'}"
        async with self._http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    _take_http(answer, json.loads(line.removeprefix("data: ")))
        return answer


async def _once(message: Any) -> Any:
    yield message


def _take_http(answer: Answer, event: dict[str, Any]) -> None:
    """Triton's JSON has a single element without its list."""
    if "error" in event:
        answer.error += event["error"]
        return
    answer.add({name: value if isinstance(value, list) else [value] for name, value in event.items()})


@dataclass
class Report:
    """What came of a run; `misses` says what went wrong."""

    dropped: int = 0
    equal: int = 0
    misses: list[str] = field(default_factory=list)

    def expect(self, holds: bool, words: str) -> None:
        """Note a miss unless `holds`."""
        if not holds:
            self.misses.append(words)


def counted(answers: list[Answer]) -> dict[str, float]:
    """The counters that the metrics page must have grown by, from what the client received."""
    drafts = [stats for answer in answers for stats in answer.stats]
    return {
        "dflash:prompt_tokens_total": sum(answer.num_input_tokens for answer in answers),
        "dflash:generation_tokens_total": sum(len(ids) for answer in answers for ids in answer.token_ids),
        "dflash:request_success_total": sum(len(answer.reasons) for answer in answers),
        "dflash:request_errors_total": 0,
        "dflash:spec_decode_num_drafts_total": sum(stats["num_drafts"] for stats in drafts),
        "dflash:spec_decode_num_draft_tokens_total": sum(stats["num_draft_tokens"] for stats in drafts),
        "dflash:spec_decode_num_accepted_tokens_total": sum(stats["num_accepted_tokens"] for stats in drafts),
        "dflash:spec_decode_num_accepted_tokens_per_pos_total": sum(
            sum(stats["num_accepted_tokens_per_pos"]) for stats in drafts
        ),
        "dflash:num_preemptions_total": sum(stats["num_preemptions"] for stats in drafts),
    }


async def settled(metrics_url: str) -> MetricsPage:
    """The page once all that was sent before is on it and no request runs, or after `LONGEST_SETTLE_S`."""
    end = time.monotonic() + LONGEST_SETTLE_S
    while True:
        await asyncio.sleep(SETTLE_S)
        page = MetricsPage.read(metrics_url)
        if page.value("dflash:num_requests_in_flight") == 0 or time.monotonic() > end:
            return page


async def run(grpc_url: str, http_url: str, metrics_url: str, cases: list[Case]) -> Report:
    """Answer every case alone, then all at once with those that are dropped, and compare."""
    report = Report()
    client = Client(grpc_url, http_url)
    before = await settled(metrics_url)
    alone, so_far = {}, progress("answers alone")
    # Those with stop strings first: a counter of speculation never decreases, so where the page had drafts past a stop
    # string, it stands still until later requests have made up for them.
    for done, case in enumerate(sorted(cases, key=lambda case: "stop" not in case.parameters), 1):
        alone[id(case)] = await client.send(case.alone())
        so_far.step(done, len(cases))
    after = await settled(metrics_url)
    expected = counted([answer for answer in alone.values() if answer is not None])
    for name, amount in expected.items():
        grown = after.value(name) - before.value(name)
        report.expect(grown == amount, f"{name} grew by {grown:.0f} and the client counted {amount:.0f}")
    reasons = Counter(reason for answer in alone.values() if answer is not None for reason in answer.reasons)
    was, now = (page.by("dflash:request_success_total", "finished_reason") for page in (before, after))
    for reason, count in reasons.items():
        report.expect(now[reason] - was.get(reason, 0) == count, f"finish reason {reason}: {count} were received")

    together = await asyncio.gather(*(client.send(case) for case in cases))
    page = await settled(metrics_url)
    for name in ("dflash:num_requests_running", "dflash:num_requests_waiting", "dflash:kv_cache_usage_perc"):
        report.expect(page.value(name) == 0, f"{name} is {page.value(name):g} after the last answer")
    for case, answer in zip(cases, together, strict=True):
        if case.drop_s is not None:
            report.dropped += answer is None
            continue
        wanted = alone[id(case)]
        same = answer is not None and wanted is not None and not answer.error and answer.said == wanted.said
        report.equal += same
        report.expect(same, f"{case} got {answer and answer.said} and alone {wanted and wanted.said}")
    await client.close()
    asked = sum(case.drop_s is not None for case in cases)
    report.expect(
        report.dropped >= LEAST_DROPPED * asked,
        f"only {report.dropped} of {asked} clients went away before their answer",
    )
    return report


def draw(count: int, dropped: int, seed: int) -> list[Case]:
    """`count` random requests, `dropped` of them with a client that goes away."""
    rng = random.Random(seed)
    goes = [True] * dropped + [False] * (count - dropped)
    rng.shuffle(goes)
    latest_drop_s = min(LATEST_DROP_S, len(goes) * LATEST_DROP_OF_EACH_S)
    return [Case.draw(rng, latest_drop_s if gone else None) for gone in goes]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Send random requests, drop many, and compare the others.")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--dropped", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cases = draw(args.requests, args.dropped, args.seed)
    settings = {"max_num_seqs": "16", "max_model_len": "1024", "kv_cache_gb": "0.1", "kv_write_guard": "true"}
    started = time.monotonic()
    with TritonServer(settings, http_port=0, grpc_port=0, metrics_port=0) as server:
        report = asyncio.run(run(server.grpc_url, server.http_url, server.metrics_url, cases))
    kept = args.requests - args.dropped
    print(f"{args.requests} requests at once, seed {args.seed}, {time.monotonic() - started:.0f} s in all")
    print(f"clients that went away before their answer was complete: {report.dropped} of {args.dropped}")
    print(f"of the others equal to their answer alone: {report.equal} of {kept}")
    print("\n".join(f"MISS: {miss[:1000]}" for miss in report.misses[:10]) or "counters and gauges: as expected")
    return int(bool(report.misses))


if __name__ == "__main__":
    sys.exit(main())
