"""POST /v1/chat/completions."""

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
from dflash_openai.sampling import max_tokens, sampling_parameters
from dflash_openai.schemas import ChatRequest, decode
from dflash_openai.sse import DONE, EventStream, event
from dflash_openai.state import Frontend
from dflash_openai.usage import UsageCounter


async def create_chat_completion(request: Request) -> Response:
    """Answer messages."""
    frontend: Frontend = request.app.state.frontend
    body = decode(await request.body(), ChatRequest)
    model = frontend.model(body.model)
    sampling = sampling_parameters(body)
    token_ids = await model.prompts.from_messages(_messages(body), _template_options(body))
    limit = max_tokens(body, len(token_ids), model.description)
    stream = bool(body.stream)
    generation = Generation(frontend.pool, [token_ids], sampling, request.receive, stream, [limit])
    answer = _Answer(body, body.model or model.names[0], len(token_ids))
    if not stream:
        try:
            return answer.whole((await generation.results())[0])
        finally:
            await generation.aclose()
    try:
        first = await generation.first()
    except BaseException:
        await generation.aclose()
        raise
    return EventStream(answer.events(first, generation), generation.aclose)


def _messages(body: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates know them. Raises `ApiError`."""
    if not body.messages:
        raise invalid("'messages' is an empty list", "messages")
    messages = []
    for index, given in enumerate(body.messages):
        message = {name: value for name, value in given.items() if value is not None}
        if message.get("role") == "developer":
            message["role"] = "system"
        content = message.setdefault("content", "")
        if not isinstance(content, str | list):
            raise invalid(f"message {index}: 'content' must be a text or a list of parts", f"messages[{index}].content")
        messages.append(message)
    return messages


def _template_options(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template."""
    options = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        options["enable_thinking"] = body.enable_thinking
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


class _Answer:
    """The JSON of one answer, in one piece or in events."""

    def __init__(self, body: ChatRequest, model: str, num_prompt_tokens: int) -> None:
        self._body = body
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = model
        self._usage = UsageCounter(num_prompt_tokens)
        self._begun: set[int] = set()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, result: Any) -> Response:
        """The response with all completions."""
        choices = []
        for index, completion in enumerate(result.completions):
            self._usage.num_output_tokens += completion.num_output_tokens
            self._usage.add_stats(completion.spec_stats)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": completion.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": completion.finish_reason,
                }
            )
        answer: dict[str, Any] = {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage.usage(),
        }
        if (metrics := self._usage.metrics()) is not None:
            answer["metrics"] = metrics
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def events(self, first: Item | None, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        try:
            if first is not None:
                yield self._events(first)
            async for item in generation.rest():
                yield self._events(item)
        except ClientGone:
            return
        except ApiError as error:
            yield event(as_event(error)) + DONE
            return
        yield self._last() + DONE

    def _events(self, item: Item) -> bytes:
        _, delta = item
        self._usage.add(delta)
        begin = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            begin = self._chunk(delta.index, {"role": "assistant", "content": ""})
        content = {"content": delta.text} if delta.text else {}
        return begin + self._chunk(delta.index, content, delta.finish_reason)

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _last(self) -> bytes:
        """The event after the last choice: usage, if it was asked for."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return b""
        last: dict[str, Any] = {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": self._usage.usage(),
        }
        if (metrics := self._usage.metrics()) is not None:
            last["metrics"] = metrics
        return event(last)
