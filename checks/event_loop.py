"""Sends the OpenAI front end the largest bodies that it takes, and prints for how long each keeps all others waiting.

`python -m checks.event_loop`. The application runs in this process, before a stand-in of Triton that speaks its gRPC
messages, so that what is measured is the front end's own work: the longest time in which its event loop did nothing
else. Other programs of the machine take the processor too, so no more of it counts than the processor time that this
process took meanwhile, and of `--tries` the shortest. The exit status is 1 where a body stops it for more than
`--limit` milliseconds, or is not answered as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message
from tritonclient.grpc import service_pb2

from dflash_client.errors import ClientError
from dflash_client.grpc_messages import encode, read_response
from dflash_client.grpc_transport import LARGE_BYTES
from dflash_client.request import Request
from dflash_client.responses import Outputs
from dflash_openai.app import create_app
from dflash_openai.config import FrontendConfig
from dflash_openai.triton_pool import ModelDescription, TritonPool

TICK_S = 0.002
TOP = 20
WORD = " a"
_ENTRY = {str(token): {"logprob": -1.2345678, "rank": token, "decoded_token": WORD} for token in range(1, TOP + 2)}
LOGPROBS = json.dumps(_ENTRY)
# Of an answer that comes in pieces: as many as are read without a thread.
TOKENS_A_RESPONSE = 40
# The responses to a request, by its kind.
Answers = dict[tuple[bool, int], list[bytes]]


class _Call:
    """A call of one request, whose responses are made before it is measured."""

    def __init__(self, request: Request, answers: Answers) -> None:
        self._request, self._answers = request, answers

    async def responses(self) -> AsyncGenerator[Outputs, None]:
        """The request as it is sent, and the response as it comes."""
        encode(self._request).SerializeToString()
        await asyncio.sleep(0.001)
        sampling = self._request.sampling or ""
        kind = 0
        if "prompt_logprobs" in sampling:
            kind = len(self._request.token_ids or ())
        elif '"logprobs"' in sampling:
            kind = -1
        for data in self._answers[self._request.stream, kind]:
            await asyncio.sleep(0)
            yield await asyncio.to_thread(read_response, data) if len(data) > LARGE_BYTES else read_response(data)

    def cancel(self) -> None:
        """Nothing runs."""


def _message(finish_reason: str = "length", **outputs: str) -> bytes:
    """A response with one element of each output."""
    response = service_pb2.ModelStreamInferResponse()
    for name, text in {"text_output": WORD, "finish_reason": finish_reason, **outputs}.items():
        data = text.encode()
        response.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.infer_response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
    return bytes(response.SerializeToString())


def _answers(length: int, num_bytes: float) -> Answers:
    """The answers with log-probabilities of a prompt of `length` tokens, and of an answer of `num_bytes`."""
    of_prompt = f"[null, {', '.join([LOGPROBS] * (length - 1))}]"
    num_tokens = max(1, int(num_bytes / len(LOGPROBS)))

    def of(count: int) -> str:
        return f"[{', '.join([LOGPROBS] * count)}]"

    pieces = [_message("None", logprobs=of(TOKENS_A_RESPONSE))] * (num_tokens // TOKENS_A_RESPONSE)
    return {
        (False, 0): [_message()],
        (True, length): [_message("None", prompt_logprobs=of_prompt), _message()],
        (False, length): [_message(prompt_logprobs=of_prompt)],
        (True, -1): [*pieces, _message()],
        (False, -1): [_message(logprobs=of(num_tokens))],
    }


class _Transport:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def call(self, request: Request, deadline: float) -> _Call:
        return _Call(request, self._answers)

    async def probe(self, model: str, timeout_s: float) -> ClientError | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""


class StandIn(TritonPool):
    """One server that answers each request with one token, and with as many log-probabilities as it asks for."""

    def __init__(self, description: ModelDescription, answers: Answers) -> None:
        """answers: by whether they come in pieces, and by the number of prompt tokens that have log-probabilities; -1:
        the answer has; 0: none has."""
        super().__init__(FrontendConfig())
        self._clients[0]._transport = _Transport(answers)  # type: ignore[assignment]
        self._description = description

    async def describe(self, timeout_s: float) -> ModelDescription:
        """What it was made with."""
        return self._description


@dataclass(frozen=True)
class Body:
    """One kind of body: its path, and the status that it must get."""

    path: str
    status: int
    content: bytes
    method: str = "POST"


def body(path: str, status: int, fields: Mapping[str, Any] | bytes) -> Body:
    """A body of these fields."""
    content = fields if isinstance(fields, bytes) else json.dumps(fields, separators=(",", ":")).encode()
    return Body(path, status, content)


def bodies(scale: float, length: int, num_scored: int) -> dict[str, Callable[[], Body]]:
    """All kinds, as large as they may be times `scale`, and some that are larger still. Prompts have `length` tokens;
    `num_scored` of them have log-probabilities."""

    def of(number: float) -> int:
        return max(1, int(number * scale))

    completions, chat, responses = "/v1/completions", "/v1/chat/completions", "/v1/responses"
    ids = [7] * length
    num_prompts = of(490_000 / (length + 1))
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    user = {"role": "user", "content": "x"}
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(of(1000))]
    return {
        "ids, echo": lambda: body(completions, 200, {"prompt": [ids] * num_prompts, "echo": True, "max_tokens": 0}),
        "ids, the last bad": lambda: body(completions, 400, {"prompt": [ids] * (num_prompts - 1) + [[-1]]}),
        "1000 x ids, echo": lambda: body(completions, 400, {"prompt": [[7] * 3900] * 1000, "echo": True}),
        "prompt_logprobs": lambda: body(
            completions, 200, {"prompt": [ids] * num_scored, "max_tokens": 1, "prompt_logprobs": TOP}
        ),
        "64 x prompt_logprobs": lambda: body(
            completions, 400, {"prompt": [ids] * 64, "max_tokens": 1, "prompt_logprobs": TOP}
        ),
        "logprobs": lambda: body(chat, 200, {"messages": [user], "logprobs": True, "top_logprobs": TOP}),
        "texts": lambda: body(completions, 200, {"prompt": ["ab " * (length // 6)] * of(1000), "max_tokens": 1}),
        "metadata": lambda: body(completions, 200, {"prompt": "x", "metadata": {str(i): "x" for i in range(of(49e3))}}),
        "metadata, too many": lambda: body(
            completions, 400, {"prompt": "x", "metadata": {str(i): "x" for i in range(500_000)}}
        ),
        "logit_bias": lambda: body(
            completions, 200, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(of(49e3))}}
        ),
        "logit_bias, too many": lambda: body(
            completions, 400, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(600_000)}}
        ),
        "logit_bias x prompts": lambda: body(
            completions, 200, {"prompt": ["x"] * of(100), "logit_bias": {str(i): 1 for i in range(of(40e3))}}
        ),
        "kwargs": lambda: body(
            chat, 200, {"messages": [user], "chat_template_kwargs": {"a": [1] * of(490e3)}, "max_tokens": 1}
        ),
        "calls": lambda: body(responses, 400, {"input": [call] * of(12e3)}),
        "calls, too many": lambda: body(responses, 400, {"input": [call] * 20_000}),
        "messages": lambda: body(chat, 400, {"messages": [user] * of(24e3)}),
        "tools, forced": lambda: body(chat, 400, {"messages": [user], "tools": tools, "tool_choice": "required"}),
        "text of 8 MB": lambda: body(completions, 400, {"prompt": "ab" * of(3.9e6)}),
        "quotes": lambda: body(completions, 400, {"prompt": '":,' * of(1.5e6)}),
        "escapes": lambda: body(completions, 400, {"prompt": "\u00e9" * of(1.3e6)}),
        "tokenize": lambda: body("/tokenize", 200, {"prompt": "a " * (length // 2), "return_token_strs": True}),
        "detokenize": lambda: body("/detokenize", 200, {"tokens": ids}),
        "unknown field": lambda: body(completions, 400, b'{"' + b"x" * of(7e6) + b'":1}'),
    }


@asynccontextmanager
async def _watched(stalls: list[float]) -> AsyncGenerator[None, None]:
    """Notes by how much each turn of the event loop is late, and no more than the processor time that passed."""

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, began = loop.time() + TICK_S, time.process_time()
            await asyncio.sleep(TICK_S)
            stalls.append(min(loop.time() - due, time.process_time() - began))

    watching = asyncio.create_task(watch())
    await asyncio.sleep(5 * TICK_S)
    stalls.clear()
    try:
        yield
        await asyncio.sleep(2 * TICK_S)
    finally:
        watching.cancel()


async def measure(
    pool: TritonPool, kinds: Mapping[str, Callable[[], Body]], tries: int
) -> dict[str, tuple[int, int, float, float]]:
    """By kind: the status that it must get and the one that came, the longest stall in seconds, and the seconds that
    the request took; of the try with the shortest stall."""
    app = create_app(FrontendConfig(), pool)
    measured = {}
    async with app.router.lifespan_context(app):
        models = Body("/v1/models", 200, b"", "GET")
        while (await _send(app, models))[0] != 200:
            await asyncio.sleep(0.05)
        for name, make in kinds.items():
            sent, results = make(), []
            for _ in range(tries):
                gc.collect()
                stalls: list[float] = []
                began = time.monotonic()
                async with _watched(stalls):
                    status, text = await _send(app, sent)
                took = time.monotonic() - began
                if status != sent.status:
                    print(f"{name}: {status} {text.decode()}")
                results.append((max(stalls, default=0.0), took, status))
            stall, took, status = min(results)
            measured[name] = (sent.status, status, stall, took)
    return measured


async def _send(app: ASGIApp, sent: Body) -> tuple[int, bytes]:
    """The status of the answer, and how it begins. The rest is let go as it comes: joining it is not the front end's
    work."""
    left, status, text = [sent.content], 0, b""

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, text
        status = message.get("status", status)
        text += message.get("body", b"")[: 300 - len(text)]

    scope = {"type": "http", "method": sent.method, "path": sent.path, "headers": [(b"host", b"localhost")]}
    await app({**scope, "query_string": b"", "http_version": "1.1", "scheme": "http", "state": {}}, receive, send)
    return status, text


def run(scale: float, tries: int, names: Sequence[str] = ()) -> dict[str, tuple[int, int, float, float]]:
    """Measure all kinds, or those with these names; results as of `measure`."""
    from checks.byte_tokenizer import write_byte_tokenizer

    length = 3900
    max_response_mb = 64.0 * scale
    num_scored = max(1, int(max_response_mb * 1e6 / (length * (TOP + 1) * 70)) - 1)
    answers = _answers(length, max_response_mb * 0.9e6)
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        description = ModelDescription(
            max_model_len=4000,
            vocab_size=200_000,
            num_speculative_tokens=0,
            max_n=64,
            tokenizer=directory,
            structured_outputs=True,
            max_response_mb=max_response_mb,
        )
        kinds = bodies(scale, length, num_scored)
        if names:
            kinds = {name: kinds[name] for name in names}

        async def measured() -> dict[str, tuple[int, int, float, float]]:
            return await measure(StandIn(description, answers), kinds, tries)

        return asyncio.run(measured())


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes (%(default)g)")
    parser.add_argument("--tries", type=int, default=3, help="%(default)s")
    parser.add_argument("--limit", type=float, default=50.0, metavar="MS", help="%(default)g")
    parser.add_argument("names", nargs="*", help="kinds (all)")
    given = parser.parse_args(arguments)
    missed = False
    for name, (wanted, status, stall, took) in run(given.scale, given.tries, given.names).items():
        kept = status == wanted and stall * 1000 <= given.limit
        missed = missed or not kept
        print(
            f"{name:24s} {status} after {took:6.2f} s, others waited {stall * 1000:6.1f} ms",
            "" if kept else "MISSED",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
