"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.errors import ApiError, ClientGone, as_event, invalid
from dflash_openai.generation import Generation, Item
from dflash_openai.prompts import PromptBuilder
from dflash_openai.sampling import max_tokens, sampling_parameters
from dflash_openai.schemas import CompletionRequest, decode
from dflash_openai.sse import DONE, EventStream, event
from dflash_openai.state import Frontend
from dflash_openai.usage import UsageCounter

MAX_PROMPTS = 1024


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    frontend: Frontend = request.app.state.frontend
    body = decode(await request.body(), CompletionRequest)
    model = frontend.model(body.model)
    if body.suffix:
        raise invalid("'suffix' is not supported: the model completes a text at its end only", "suffix")
    sampling = sampling_parameters(body)
    prompts = await _prompts(body, model.prompts)
    limits = [max_tokens(body, len(token_ids), model.description) for token_ids in prompts]
    stream = bool(body.stream)
    generation = Generation(frontend.pool, prompts, sampling, request.receive, stream, limits)
    answer = _Answer(body, body.model or model.names[0], prompts)
    if not stream:
        try:
            return answer.whole(await generation.results())
        finally:
            await generation.aclose()
    try:
        first = await generation.first()
    except BaseException:
        await generation.aclose()
        raise
    return EventStream(answer.events(first, generation), generation.aclose)


async def _prompts(body: CompletionRequest, builder: PromptBuilder) -> list[list[int]]:
    """Token ids of each prompt."""
    given = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(given, str):
        return [await builder.from_text(given, special)]
    if given and all(type(item) is int for item in given):
        return [builder.check_token_ids(given)]
    if len(given) > MAX_PROMPTS:
        raise invalid(f"there are {len(given)} prompts; allowed: {MAX_PROMPTS}", "prompt")
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(await builder.from_text(item, special))
        elif isinstance(item, list) and all(type(token_id) is int for token_id in item):
            prompts.append(builder.check_token_ids(item))
        else:
            raise invalid("'prompt' is a text, a list of texts, a list of token ids, or a list of such lists", "prompt")
    if not prompts:
        raise invalid("'prompt' is an empty list", "prompt")
    return prompts


class _Answer:
    """The JSON of one answer, in one piece or in events."""

    def __init__(self, body: CompletionRequest, model: str, prompts: list[list[int]]) -> None:
        self._body = body
        self._n = body.n or 1
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = UsageCounter(sum(map(len, prompts)))

    def whole(self, results: list[Any]) -> Response:
        """The response with all completions."""
        choices = []
        for prompt, result in enumerate(results):
            for index, completion in enumerate(result.completions):
                self._usage.num_output_tokens += completion.num_output_tokens
                self._usage.add_stats(completion.spec_stats)
                choices.append(
                    {
                        "index": prompt * self._n + index,
                        "text": completion.text,
                        "logprobs": None,
                        "finish_reason": completion.finish_reason,
                    }
                )
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": self._usage.usage()}
        if (metrics := self._usage.metrics()) is not None:
            answer["metrics"] = metrics
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def events(self, first: Item | None, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        try:
            if first is not None:
                yield self._event(first)
            async for item in generation.rest():
                yield self._event(item)
        except ClientGone:
            return
        except ApiError as error:
            yield event(as_event(error)) + DONE
            return
        yield self._last() + DONE

    def _event(self, item: Item) -> bytes:
        prompt, delta = item
        self._usage.add(delta)
        choice = {
            "index": prompt * self._n + delta.index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        return event({**self._head, "choices": [choice]})

    def _last(self) -> bytes:
        """The event after the last choice: usage, if it was asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return b""
        last: dict[str, Any] = {**self._head, "choices": [], "usage": self._usage.usage()}
        if (metrics := self._usage.metrics()) is not None:
            last["metrics"] = metrics
        return event(last)
