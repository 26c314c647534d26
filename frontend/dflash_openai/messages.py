"""An answer's text as a message: reasoning, content and tool calls, in one piece or in deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_openai.parsing import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallDelta
from dflash_openai.tools import NO_TOOLS, ToolUse


def tool_call_fields(event: ToolCallDelta) -> dict[str, Any]:
    """A tool call, or more of its arguments, as chat completions write it."""
    if not event.first:
        return {"function": {"arguments": event.arguments}}
    return {
        "id": event.id,
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }


def whole_calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The tool calls that the deltas of a whole answer make, as chat completions write them."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallDelta) and event.first:
            calls.append(tool_call_fields(event))
        elif isinstance(event, ToolCallDelta):
            calls[-1]["function"]["arguments"] += event.arguments
    return calls


def reasoning_fields(text: str | None) -> dict[str, str | None]:
    """Reasoning by both of the names that clients read: vLLM's and the older one, DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


class MessageReader:
    """Reads one completion's text. Without `include_reasoning` what the model thinks is left out. `use`: what the
    request says of tools. `has_reasoned`: whether it has thought so far."""

    def __init__(self, parser: OutputParser, include_reasoning: bool = True, use: ToolUse = NO_TOOLS) -> None:
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._use = use
        # Whether the last call is complete; None without calls.
        self._called: bool | None = None
        self._is_empty = True
        self.has_reasoned = False

    def events(self, text: str, finished: bool) -> list[Event]:
        """The events of more text, and at the end those of what was held back."""
        events = self._parser.feed(text)
        if finished:
            events += self._parser.finish()
        for event in events:
            if isinstance(event, ToolCallDelta) and event.last:
                self._called = event.complete
            elif isinstance(event, ReasoningDelta):
                self.has_reasoned = True
        return [event for event in events if self._include_reasoning or not isinstance(event, ReasoningDelta)]

    @property
    def called(self) -> bool:
        """Whether the answer has calls, the last of which is complete."""
        return self._called is True

    def deltas(self, text: str, finished: bool) -> Iterator[dict[str, Any]]:
        """The same as the fields of OpenAI's deltas, which a client joins to the whole message."""
        for event in self.events(text, finished):
            self._is_empty = False
            if isinstance(event, ToolCallDelta) and not (event.first or event.arguments):
                continue
            if isinstance(event, ToolCallDelta):
                yield {"tool_calls": [{"index": event.index, **tool_call_fields(event)}]}
            elif isinstance(event, ReasoningDelta):
                yield reasoning_fields(event.text)
            else:
                yield {"content": event.text}
        if finished and self._is_empty and not self._use.forced:
            yield {"content": ""}

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a whole text. Its content is null where it has calls or reasoning alone, or had to have
        a call and broke off before its name."""
        events = self.events(text, finished=True)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = whole_calls(events)
        return {
            "role": "assistant",
            "content": content if content or not (calls or reasoning or self._use.forced) else None,
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
            "tool_calls": calls or None,
            **reasoning_fields(reasoning or None),
        }

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended: `tool_calls` where it ended by itself and calls tools. A call that the request named
        is no decision of the model, and ends with `stop` as OpenAI has it."""
        return "tool_calls" if reason == "stop" and self._called and not self._use.named else reason
