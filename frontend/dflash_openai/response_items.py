"""The items of a response, and the events that tell how they come about."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from dflash_openai.parsing import ContentDelta, Event, ReasoningDelta, ToolCallDelta
from dflash_openai.responses_schemas import ClientTool

Fields = dict[str, Any]


class ResponseItems:
    """Builds the items out of an answer's events: a run of reasoning, of content, or a call is an item each.

    `output` has the finished ones. Events are the fields of OpenAI's, without a sequence number. `logprobs_of` gives
    the log-probabilities of the tokens of a piece of content. `tools` are the request's by the names that the model
    calls them by.
    """

    def __init__(
        self,
        logprobs_of: Callable[[ContentDelta], list[Fields]] = lambda _: [],
        tools: Mapping[str, ClientTool] = MappingProxyType({}),
    ) -> None:
        self.output: list[Fields] = []
        self._tools = tools
        self._logprobs_of = logprobs_of
        self._open: Fields | None = None
        self._texts: list[str] = []
        self._logprobs: list[Fields] = []

    def add(self, events: Iterable[Event]) -> Iterator[Fields]:
        """What more of the answer changes."""
        for event in events:
            if isinstance(event, ToolCallDelta):
                yield from self._call(event)
                continue
            kind = "reasoning" if isinstance(event, ReasoningDelta) else "message"
            if self._open is not None and self._open["type"] != kind:
                yield from self.close("completed")
            if self._open is None:
                yield from self._begin(kind)
            self._texts.append(event.text)
            logprobs = self._logprobs_of(event) if isinstance(event, ContentDelta) else []
            self._logprobs += logprobs
            yield self._text_event("delta", logprobs, delta=event.text)

    def finish(self, status: str) -> Iterator[Fields]:
        """Finish the answer; one of nothing is a message without text, so that clients find an item."""
        if self._open is None and not self.output:
            yield from self._begin("message")
        yield from self.close(status)

    def close(self, status: str) -> Iterator[Fields]:
        """Finish the item that is being written, if there is one. `status`: completed or incomplete."""
        if self._open is None:
            return
        text = "".join(self._texts)
        yield self._text_event("done", self._logprobs, text=text)
        part = self._part(text, self._logprobs)
        yield self._at_item("response.content_part.done", content_index=0, part=part)
        item = {**self._open, "status": status, "content": [part]}
        self._open, self._texts, self._logprobs = None, [], []
        yield self._finished(item)

    def _begin(self, kind: str) -> Iterator[Fields]:
        if kind == "reasoning":
            self._open = {"id": f"rs_{secrets.token_hex(16)}", "type": kind, "summary": []}
        else:
            self._open = {"id": f"msg_{secrets.token_hex(16)}", "type": kind, "role": "assistant"}
        item = {**self._open, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": item}
        yield self._at_item("response.content_part.added", content_index=0, part=self._part("", []))

    def _call(self, event: ToolCallDelta) -> Iterator[Fields]:
        """More of a call. The input of a custom tool is one text, and comes when its call is whole."""
        tool = self._tools.get(event.name, ClientTool(event.name))
        kind, what = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        if event.first:
            yield from self.close("completed")
            self._open = {
                "id": f"{'ctc' if tool.is_custom else 'fc'}_{secrets.token_hex(16)}",
                "type": kind,
                "call_id": event.id,
                "name": tool.name,
                **({} if tool.namespace is None else {"namespace": tool.namespace}),
            }
            begun = {**self._open, what: "", "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": len(self.output), "item": begun}
        assert self._open is not None
        self._texts.append(event.arguments)
        if event.arguments and not tool.is_custom:
            yield self._at_item(f"response.{kind}_{what}.delta", delta=event.arguments)
        if event.last:
            given = "".join(self._texts)
            if tool.is_custom:
                given = _custom_input(given)
                yield self._at_item(f"response.{kind}_{what}.delta", delta=given)
            name = {} if tool.is_custom else {"name": tool.name}
            yield self._at_item(f"response.{kind}_{what}.done", **name, **{what: given})
            item = {**self._open, what: given, "status": "completed" if event.complete else "incomplete"}
            self._open, self._texts = None, []
            yield self._finished(item)

    def _finished(self, item: Fields) -> Fields:
        self.output.append(item)
        return {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}

    def _text_event(self, what: str, logprobs: list[Fields], **fields: Any) -> Fields:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return self._at_item(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._at_item(f"response.output_text.{what}", content_index=0, **fields, logprobs=logprobs)

    def _at_item(self, kind: str, **fields: Any) -> Fields:
        """An event of the item that is being written."""
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.output), **fields}

    def _part(self, text: str, logprobs: list[Fields]) -> Fields:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _custom_input(arguments: str) -> str:
    """The input of a custom tool, which the model writes as the argument of a function; as it is where it is none."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (msgspec.MsgspecError, KeyError, RecursionError):
        return arguments
