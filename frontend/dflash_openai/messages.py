"""An answer's text as a message: reasoning, content and tool calls, in one piece or in deltas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_openai.parsing import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallDelta


def tool_call_fields(event: ToolCallDelta) -> dict[str, Any]:
    """A tool call as chat completions write it."""
    return {
        "id": event.id,
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }


class MessageReader:
    """Reads one completion's text. Without `include_reasoning` what the model thinks is left out. `named_tool`: the
    request names the tool that is called."""

    def __init__(self, parser: OutputParser, include_reasoning: bool = True, named_tool: bool = False) -> None:
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._named_tool = named_tool
        self._calls = False

    def events(self, text: str, finished: bool) -> list[Event]:
        """The events of more text, and at the end those of what was held back."""
        events = self._parser.feed(text)
        if finished:
            events += self._parser.finish()
        self._calls = self._calls or any(isinstance(event, ToolCallDelta) for event in events)
        return [event for event in events if self._include_reasoning or not isinstance(event, ReasoningDelta)]

    def deltas(self, text: str, finished: bool) -> Iterator[dict[str, Any]]:
        """The same as the fields of OpenAI's deltas."""
        for event in self.events(text, finished):
            if isinstance(event, ToolCallDelta):
                yield {"tool_calls": [{"index": event.index, **tool_call_fields(event)}]}
            else:
                yield {"reasoning" if isinstance(event, ReasoningDelta) else "content": event.text}

    def message(self, text: str) -> dict[str, Any]:
        """The whole message of a whole text."""
        events = self.events(text, finished=True)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = [tool_call_fields(event) for event in events if isinstance(event, ToolCallDelta)]
        return {
            "role": "assistant",
            "content": content if content or not (calls or reasoning) else None,
            "refusal": None,
            **({"reasoning": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended: `tool_calls` where it ended by itself and calls tools. A call that the request named
        is no decision of the model, and ends with `stop` as OpenAI has it."""
        return "tool_calls" if reason == "stop" and self._calls and not self._named_tool else reason
