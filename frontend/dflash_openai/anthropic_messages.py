"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, by the same model."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_client import GenerationResult
from dflash_openai.anthropic_errors import error_fields
from dflash_openai.anthropic_request import (
    CLIENT_NAMES,
    CountTokensRequest,
    MessagesRequest,
    arguments_of,
    as_chat,
)
from dflash_openai.bodies import PiecesResponse, encoded, read_body
from dflash_openai.chat import answer_draft, draft_of
from dflash_openai.conversation import Conversation, prepare
from dflash_openai.errors import ApiError
from dflash_openai.generation import Item
from dflash_openai.messages import MessageReader
from dflash_openai.parsing import ContentDelta, Event, ReasoningDelta, ToolCallDelta
from dflash_openai.sse import named_event
from dflash_openai.state import Frontend
from dflash_openai.usage import UsageCounter

Fields = dict[str, Any]
# Clients send a thought back with the word that signs it, which nothing here reads.
SIGNATURE = "unsigned"


async def create_message(request: Request) -> Response:
    """Answer messages."""
    frontend: Frontend = request.app.state.frontend
    body, draft = await read_body(request, MessagesRequest, lambda one: draft_of(as_chat(one), frontend, CLIENT_NAMES))
    return await answer_draft(request, draft, lambda asked, limit: MessageAnswer(body, asked, limit))


async def count_tokens(request: Request) -> Response:
    """The tokens of a prompt, as a message of it would have."""
    frontend: Frontend = request.app.state.frontend
    _, draft = await read_body(request, CountTokensRequest, lambda one: draft_of(as_chat(one), frontend, CLIENT_NAMES))
    asked = await prepare(draft)
    return Response(msgspec.json.encode({"input_tokens": len(asked.prompt)}), media_type="application/json")


class MessageAnswer:
    """The JSON of one message, in one piece or as events."""

    ping = named_event("ping", {"type": "ping"})

    def __init__(self, body: MessagesRequest, asked: Conversation, limit: int) -> None:
        """limit: the most tokens of the answer, fewer than asked for where no more fit."""
        self._reader = MessageReader(asked.parser(), use=asked.use)
        self._blocks = MessageBlocks()
        self._usage = UsageCounter(len(asked.prompt))
        self._reasoning = asked.reasoning_tokens()
        self._fewer_fit = limit < body.max_tokens
        self._head: Fields = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.model or asked.model.names[0],
        }

    def whole(self, results: Sequence[GenerationResult]) -> Response:
        """The finished message."""
        completion = results[0].completions[0]
        self._usage.add(completion)
        self._reasoning.add(completion.token_ids)
        events = self._reader.events(completion.text, finished=True)
        for _ in (*self._blocks.add(events), *self._blocks.close()):
            pass
        message = {
            **self._head,
            "content": self._blocks.content,
            **self._ended(completion.finish_reason, completion.stop_reason),
            "usage": self._usage_fields(),
        }
        return PiecesResponse(encoded(message))

    async def events(self, items: AsyncIterable[Item]) -> AsyncGenerator[bytes, None]:
        """The events of a stream: the message as it begins, its blocks, and how it ended."""
        begun = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage_fields()}
        yield _written([{"type": "message_start", "message": begun}]) + self.ping
        reason: str | None = None
        stop: str | int | None = None
        async for _, delta in items:
            self._usage.add(delta)
            self._reasoning.add(delta.token_ids)
            reason, stop = delta.finish_reason or reason, delta.stop_reason or stop
            events = self._reader.events(delta.text, delta.finish_reason is not None)
            if written := _written(self._blocks.add(events)):
                yield written
        ended = {"type": "message_delta", "delta": self._ended(reason, stop), "usage": self._usage_fields()}
        yield _written([*self._blocks.close(), ended, {"type": "message_stop"}])

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return _written([error_fields(error.status, error.message)])

    def _ended(self, reason: str | None, stop: str | int | None) -> Fields:
        """Why the message ended; null where a time limit ended it, for which the API has no word."""
        words = {"stop": "end_turn", "length": "model_context_window_exceeded" if self._fewer_fit else "max_tokens"}
        word, sequence = words.get(reason or ""), stop if isinstance(stop, str) else None
        if reason == "stop" and self._reader.called:
            word = "tool_use"
        elif sequence is not None:
            word = "stop_sequence"
        return {"stop_reason": word, "stop_sequence": sequence if word == "stop_sequence" else None}

    def _usage_fields(self) -> Fields:
        """Cached tokens are counted by themselves, 0 where the server does not tell them."""
        usage = self._usage.usage()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reasoning.count if self._reader.has_reasoned else 0},
        }


class MessageBlocks:
    """Builds the blocks out of an answer's events: a run of reasoning, of content, or a call is a block each. `content`
    has the finished ones."""

    def __init__(self) -> None:
        self.content: list[Fields] = []
        self._open: Fields | None = None
        self._texts: list[str] = []

    def add(self, events: Iterable[Event]) -> Iterator[Fields]:
        """The events of Anthropic's API for what more of the answer changes."""
        for event in events:
            if isinstance(event, ToolCallDelta):
                if event.first:
                    yield from self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
                if event.arguments:
                    yield from self._more(event.arguments, "input_json_delta", "partial_json")
            elif isinstance(event, ReasoningDelta):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""}, joins=True)
                yield from self._more(event.text, "thinking_delta", "thinking")
            elif isinstance(event, ContentDelta):
                yield from self._begin({"type": "text", "text": ""}, joins=True)
                yield from self._more(event.text, "text_delta", "text")

    def close(self) -> Iterator[Fields]:
        """Finish the block that is being written, if there is one."""
        if self._open is None:
            return
        block, text = self._open, "".join(self._texts)
        self._open, self._texts = None, []
        if block["type"] == "tool_use":
            block = {**block, "input": arguments_of(text)}
        elif block["type"] == "thinking":
            block = {**block, "thinking": text, "signature": SIGNATURE}
            yield self._delta("signature_delta", "signature", SIGNATURE)
        else:
            block = {**block, "text": text}
        yield {"type": "content_block_stop", "index": len(self.content)}
        self.content.append(block)

    def _begin(self, block: Fields, joins: bool = False) -> Iterator[Fields]:
        """Begin a block, unless it `joins` one of its type that is being written."""
        if joins and self._open is not None and self._open["type"] == block["type"]:
            return
        yield from self.close()
        self._open = block
        yield {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _more(self, text: str, kind: str, field: str) -> Iterator[Fields]:
        self._texts.append(text)
        yield self._delta(kind, field, text)

    def _delta(self, kind: str, field: str, text: str) -> Fields:
        return {"type": "content_block_delta", "index": len(self.content), "delta": {"type": kind, field: text}}


def _written(events: Iterable[Fields]) -> bytes:
    return b"".join(named_event(fields["type"], fields) for fields in events)
