"""What chat and completions have in common: an answer in one piece or as events, with usage and errors."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response

from dflash_client import Delta, GenerationResult
from dflash_client.results import Completion, TokenLogprobs
from dflash_openai.bodies import ITEMS_A_CALL, PiecesResponse, encoded, in_thread
from dflash_openai.errors import ApiError, ClientGone
from dflash_openai.generation import Generation, Item
from dflash_openai.schemas import GenerationFields
from dflash_openai.sse import DONE, PING, EventStream, event
from dflash_openai.state import Model
from dflash_openai.usage import UsageCounter

# A stream begins after so long without its first delta: until then an error has a status of its own.
FIRST_WAIT_S = 3.0
# Fields of an answer that OpenAI or vLLM has and that have nothing to say here.
NULLS = ("service_tier", "system_fingerprint")


class Answer(ABC):
    """The JSON of one answer. Subclasses write the choices."""

    ping = PING
    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, body: GenerationFields, model: Model, prompts: Sequence[Sequence[int]]) -> None:
        """`prompts` are the token ids of each prompt."""
        self.n = body.n or 1
        self.prompts = prompts
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": body.model or model.names[0],
        }
        # Log-probabilities of each prompt's tokens, where they were asked for.
        self.of_prompts: Sequence[Sequence[TokenLogprobs | None] | None] = [None] * len(prompts)
        self.usage = UsageCounter(sum(map(len, prompts)))
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = (
            options is not None and options.include_usage is not False and bool(options.continuous_usage_stats)
        )

    @abstractmethod
    def choice(self, prompt: int, index: int, completion: Completion) -> dict[str, Any]:
        """The choice of a finished completion: number `index` of those of a prompt."""

    @abstractmethod
    def chunks(self, prompt: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """The fields of each event for a delta: `choices`, and others beside it."""

    def extra(self) -> dict[str, Any]:
        """More fields of an answer in one piece."""
        return {}

    def whole(self, results: Sequence[GenerationResult]) -> Response:
        """The response with all completions."""
        self.of_prompts = [result.prompt_logprobs for result in results]
        choices = []
        for prompt, result in enumerate(results):
            for index, completion in enumerate(result.completions):
                self.usage.add(completion)
                choices.append(encoded(self.choice(prompt, index, completion)))
        answer = {**self._head, "object": self.object, "choices": choices, "usage": self.usage.usage(), **self.extra()}
        kept = results[0].kv_transfer_params if len(results) == 1 else None
        content = encoded({**answer, **dict.fromkeys(NULLS), "kv_transfer_params": kept, **self._metrics()})
        self.of_prompts = [None] * len(results)
        return PiecesResponse(content)

    async def events(self, items: AsyncIterable[Item]) -> AsyncGenerator[bytes, None]:
        """The events of a stream: those of the deltas, then usage if it was asked for, then `[DONE]`."""
        async for item in items:
            if events := self._of(item):
                yield events
        last = b""
        if self._include_usage:
            last = self._event({"choices": [], "usage": self.usage.usage(), **self._metrics()})
        yield last + DONE

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""
        return event(error.fields()) + DONE

    def _of(self, item: Item) -> bytes:
        prompt, delta = item
        before = self.usage.usage() if self._continuous_usage else None
        self.usage.add(delta)
        if delta.is_statistics:
            # Of a choice whose end was sent.
            return b""
        events = []
        for fields in self.chunks(prompt, delta):
            if self._continuous_usage:
                begins = "role" in fields["choices"][0].get("delta", ())
                fields["usage"] = before if begins else self.usage.usage()
            elif self._include_usage:
                fields["usage"] = None
            events.append(self._event(fields))
        return b"".join(events)

    def _event(self, fields: dict[str, Any]) -> bytes:
        return event({**self._head, "object": self.chunk_object, **fields})

    def _metrics(self) -> dict[str, Any]:
        metrics = self.usage.metrics()
        return {} if metrics is None else {"metrics": metrics}


class Writer(Protocol):
    """Writes the answer of a generation. `ping`: what a stream sends that has nothing else to send."""

    ping: bytes

    def whole(self, results: Sequence[GenerationResult]) -> Response:
        """In one piece."""

    def events(self, items: AsyncIterable[Item]) -> AsyncGenerator[bytes, None]:
        """As server-sent events. Raises what reading the items does."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that fails."""


def let_go(results: list[GenerationResult]) -> None:
    """Free results piece by piece: at once, that would keep all threads waiting."""
    while results:
        result = results.pop()
        lists: list[list[Any]] = [
            list(result.prompt_logprobs or ()),
            *[list(one.logprobs or ()) for one in result.completions],
        ]
        del result
        for entries in lists:
            while entries:
                del entries[-ITEMS_A_CALL:]


async def _events(answer: Writer, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a stream, of which an error is the last one; none of it for a client that has left."""
    try:
        async with aclosing(answer.events(generation.items())) as events:
            async for data in events:
                yield data
    except ClientGone:
        return
    except ApiError as error:
        yield answer.failed(error)
    except Exception as error:  # noqa: BLE001 - a stream that just ends looks whole
        yield answer.failed(generation.defect(error))


async def respond(answer: Writer, generation: Generation) -> Response:
    """The response of a generation, which is closed with it. What fails before the first delta has its own status; a
    stream begins without one after a while, unless it may not ping."""
    streaming, ping_s = False, generation.ping_s
    try:
        if not generation.stream:
            results = await generation.results()

            def whole() -> Response:
                response = answer.whole(results)
                let_go(results)
                return response

            return await in_thread(generation.num_bytes, whole)
        begun = await generation.begin(min(FIRST_WAIT_S, ping_s / 3) if ping_s else None)
        streaming = True
        return EventStream(_events(answer, generation), generation.aclose, ping_s, not begun, answer.ping)
    finally:
        if not streaming:
            await generation.aclose()
