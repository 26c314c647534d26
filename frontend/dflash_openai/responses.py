"""POST /v1/responses and /v1/responses/input_tokens: one answer to an input, of which nothing is kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_client import Delta, GenerationResult
from dflash_client.results import Completion
from dflash_openai.bodies import PiecesResponse, encoded, read_body
from dflash_openai.chat import answer_draft, draft_of
from dflash_openai.content_logprobs import ContentLogprobs
from dflash_openai.conversation import Conversation, prepare
from dflash_openai.errors import ApiError
from dflash_openai.generation import Item
from dflash_openai.logprobs import LogprobWriter
from dflash_openai.messages import MessageReader
from dflash_openai.parsing import ContentDelta
from dflash_openai.response_items import Fields, ResponseItems
from dflash_openai.responses_schemas import ResponsesRequest, as_chat, tools_of
from dflash_openai.sse import PING, named_event
from dflash_openai.state import Frontend
from dflash_openai.usage import UsageCounter

# What a client of this endpoint calls a parameter of the model.
CLIENT_NAMES = {"response_format": "text.format", "messages": "input", "max_completion_tokens": "max_output_tokens"}


# Of a response: fields that are null unless it says more, and those of its request that are there as they were sent.
_UNUSED = ("completed_at", "error", "incomplete_details", "previous_response_id")
_REPEATED = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")


async def count_input_tokens(request: Request) -> Response:
    """The tokens of an input, as a response to it would have."""
    frontend: Frontend = request.app.state.frontend
    _, draft = await read_body(request, ResponsesRequest, lambda one: draft_of(as_chat(one), frontend, CLIENT_NAMES))
    asked = await prepare(draft)
    return PiecesResponse(encoded({"object": "response.input_tokens", "input_tokens": len(asked.prompt)}))


async def create_response(request: Request) -> Response:
    """Answer an input."""
    frontend: Frontend = request.app.state.frontend
    body, draft = await read_body(request, ResponsesRequest, lambda one: draft_of(as_chat(one), frontend, CLIENT_NAMES))
    return await answer_draft(request, draft, lambda asked, limit: ResponseAnswer(body, asked))


class ResponseAnswer:
    """The JSON of one response, in one piece or as events."""

    ping = PING

    def __init__(self, body: ResponsesRequest, asked: Conversation) -> None:
        self._reader = MessageReader(asked.parser(), body.include_reasoning is not False, asked.use)
        tools = {tool["function"]["name"]: own for tool, own in tools_of(body.tools or [])}
        self._items = ResponseItems(self._logprobs_of, tools)
        self._content_logprobs = ContentLogprobs()
        num_top = None if body.logprob_token_ids else body.top_logprobs or 0
        self._logprobs = LogprobWriter(num_top, False, asked.model.tokenizer)
        self._usage = UsageCounter(len(asked.prompt))
        self._reasoning = asked.reasoning_tokens()
        self._num_events = 0
        # Texts and token ids of the answer, where the prompt and the answer are returned as they are.
        self._raw: tuple[list[str], list[int]] | None = ([], []) if body.enable_response_messages else None
        self._asked = asked
        self._head: Fields = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or asked.model.names[0],
            **_echoed(body, asked.model.description.sampling_defaults),
        }

    def whole(self, results: Sequence[GenerationResult]) -> Response:
        """The finished response."""
        completion = results[0].completions[0]
        self._take(completion)
        for _ in self._items.add(self._reader.events(completion.text, finished=True)):
            pass
        finished, _ = self._finished(completion.finish_reason)
        return PiecesResponse(encoded(finished))

    async def events(self, items: AsyncIterable[Item]) -> AsyncGenerator[bytes, None]:
        """The events of a stream: the response as it begins, its items, and the response as it ended."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None, **self._messages()}
        yield self._written({"type": kind, "response": begun} for kind in ("response.created", "response.in_progress"))
        reason: str | None = None
        async for item in items:
            yield self._of(item)
            reason = item[1].finish_reason or reason
        finished, last = self._finished(reason)
        yield self._written([*last, {"type": f"response.{finished['status']}", "response": finished}])

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        failed = {**self._head, "status": "failed", "output": self._items.output, "usage": None}
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._written([{"type": "response.failed", "response": failed}])

    def _of(self, item: Item) -> bytes:
        _, delta = item
        self._take(delta)
        events = self._reader.events(delta.text, delta.finish_reason is not None)
        return self._written(self._items.add(events))

    def _take(self, more: Completion | Delta) -> None:
        """Count more of the answer, and keep what is written of its tokens."""
        self._usage.add(more)
        self._reasoning.add(more.token_ids)
        if self._raw is not None:
            self._raw[0].append(more.text)
            self._raw[1].extend(more.token_ids)
        self._content_logprobs.add(more.logprobs or ())

    def _messages(self) -> Fields:
        """The prompt and the answer as the model reads and writes them, in vLLM's form; nothing unless asked for."""
        if self._raw is None:
            return {}
        prompt = self._asked.prompt
        text = self._asked.model.tokenizer.decode(prompt, skip_special_tokens=False)
        sides = {"input_messages": (text, prompt), "output_messages": ("".join(self._raw[0]), self._raw[1])}
        return {
            name: [{"type": "raw_message_tokens", "message": message, "tokens": list(token_ids)}]
            for name, (message, token_ids) in sides.items()
        }

    def _logprobs_of(self, content: ContentDelta) -> list[Fields]:
        """The log-probabilities of a piece of content; none where they were not asked for."""
        return self._logprobs.tokens(self._content_logprobs.take(content.end - len(content.text), content.end))

    def _finished(self, reason: str | None) -> tuple[Fields, list[Fields]]:
        """The response as it ended, and the events of its last item."""
        status = "completed" if reason == "stop" else "incomplete"
        last = list(self._items.finish(status))
        response: Fields = {
            **self._head,
            "status": status,
            "output": self._items.output,
            "usage": self._usage_fields(),
            **self._messages(),
        }
        if status == "completed":
            response["completed_at"] = int(time.time())
        else:
            # The other reason is that the request's time has passed, for which the API has no word.
            response["incomplete_details"] = {"reason": "max_output_tokens"} if reason == "length" else None
        if (metrics := self._usage.metrics()) is not None:
            response["metrics"] = metrics
        return response, last

    def _usage_fields(self) -> Fields:
        usage = self._usage.usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count if self._reader.has_reasoned else 0},
            "total_tokens": usage["total_tokens"],
        }

    def _written(self, events: Iterable[Fields]) -> bytes:
        """Events as they are sent, numbered."""
        texts = []
        for fields in events:
            texts.append(named_event(fields["type"], {**fields, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(texts)


def _echoed(body: ResponsesRequest, defaults: Mapping[str, Any]) -> Fields:
    """What a response repeats of its request, with the defaults of what was left out: those of the model, else 1."""
    text = {name: each for name, each in (body.text or {}).items() if each is not None}
    return {
        **dict.fromkeys(_UNUSED),
        **{name: getattr(body, name) for name in _REPEATED},
        "background": False,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
