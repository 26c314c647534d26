"""Splits an answer into reasoning, content and tool calls, as its text comes in.

The regions of the text are found by the marks around them. Here a region that holds no tool call is content, with its
marks; white space that only divides regions belongs to none; and a call in reasoning that the answer's end breaks off
is a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_openai.parsing.call_streams import CallStream, Piece, call_stream
from dflash_openai.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta
from dflash_openai.parsing.reasoning_formats import ReasoningFormat
from dflash_openai.parsing.regions import BARE_CALL, BARE_CLOSE, REASONING, TOOL_CALLS, Regions, mark_at
from dflash_openai.parsing.thought_calls import ThoughtCalls
from dflash_openai.parsing.tool_formats import Schemas, ToolFormat, truncated_calls


class PlainParser:
    """All text is content."""

    def __init__(self) -> None:
        self._end = 0

    def feed(self, text: str) -> list[Event]:
        """The text."""
        self._end += len(text)
        return [ContentDelta(text, self._end)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


class RegionParser:
    """Parses one answer. `prompt` is the text that the model continues; `schemas` are the parameters of the functions
    that the request offers. At most `max_calls` tool calls are returned, all where it is None.

    forced: a grammar allows the answer nothing but reasoning and tool calls. What is neither is the beginning of a
    call, where the answer broke off: at its end a call with its arguments as far as they came, or nothing where its
    name is not whole."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        prompt: str,
        schemas: Schemas,
        max_calls: int | None = None,
        forced: bool = False,
    ) -> None:
        if reasoning is not None and reasoning.is_closed_after(prompt):
            reasoning = None
        self._tools, self._reasoning = tools, reasoning
        self._schemas = schemas
        self._max_calls, self._forced = max_calls, forced and tools is not None
        # Of an answer that is forced: text that is not read as calls.
        self._unread: list[str] = []
        in_prompt = reasoning is not None and reasoning.is_open_after(prompt)
        self._regions = Regions(
            reasoning, tools, schemas, reasoning.open if reasoning is not None and in_prompt else ""
        )
        self._thought_calls = ThoughtCalls(tools)
        # The beginning of an answer that starts within its reasoning, until it is known whether it has the open mark.
        self._implied = reasoning if reasoning is not None and reasoning.starts_open and not in_prompt else None
        self._beginning = ""
        # Whether the regions have told of anything; until then white space waits for what follows it.
        self._begun = False
        self._blank: list[str] = []
        # Of a region that may be calls: its text, what reads it, and the call that is being written.
        self._body: list[str] = []
        self._calls: CallStream | None = None
        self._call = ToolCallDelta(-1, "", "", "")
        # White space that belongs to the text so far if more of the same text follows.
        self._space: list[str] = []
        # Whether the next region that opens does so by a mark in the prompt, which is not in the answer.
        self._opens_in_prompt = in_prompt
        # Whether nothing but white space came since a region ended, or since the reasoning began.
        self._at_start = in_prompt
        self._num_calls = 0
        # What the regions were fed, up to where they have told of it, there and in the answer's text.
        self._ahead, self._told, self._position = "", 0, 0

    def feed(self, text: str) -> list[Event]:
        """As `OutputParser.feed`."""
        if not text or (not self._begun and text.isspace()):
            self._blank.append(text)
            return []
        if self._blank:
            text, self._blank = "".join([*self._blank, text]), []
        text = self._with_implied_mark(text)
        return self._without_content(self._fed(text)) if text else []

    def finish(self) -> list[Event]:
        """As `OutputParser.finish`."""
        events: list[Event] = []
        self._beginning += "".join(self._blank)
        if self._implied is not None:
            self._position = -len(self._implied.open)
            events = self._fed(self._implied.open + self._beginning)
        elif self._blank:
            events = self._fed("".join(self._blank))
        _, last = self._regions.finalize()
        events += self._events(last)
        if self._space and not self._at_start:
            events.append(ContentDelta("".join(self._space), self._position))
        events = self._without_content(events)
        if self._tools is not None and self._unread:
            calls = truncated_calls(self._tools, "".join(self._unread))
            self._tell(events, [Piece(call.name, call.arguments, complete) for call, complete in calls])
        return events

    def _without_content(self, events: list[Event]) -> list[Event]:
        """The events of an answer; of one that is forced, those that are not content."""
        if not self._forced:
            return events
        self._unread += [event.text for event in events if isinstance(event, ContentDelta)]
        return [event for event in events if not isinstance(event, ContentDelta)]

    def _fed(self, text: str) -> list[Event]:
        self._ahead, self._told = self._ahead[self._told :] + text, 0
        regions = self._regions.feed(text)
        self._begun = self._begun or bool(regions)
        self._regions.let_go()
        return self._events(regions)

    def _with_implied_mark(self, text: str) -> str:
        """What the regions are found in: the text, behind the open mark that an answer leaves out. Empty until the
        beginning decides."""
        if self._implied is None:
            return text
        self._beginning += text
        mark, begun = self._implied.open, self._beginning.lstrip()
        if mark.startswith(begun[: len(mark)]) and len(begun) < len(mark):
            return ""
        self._implied = None
        if begun.startswith(mark):
            return self._beginning
        self._position = -len(mark)
        return mark + self._beginning

    def _events(self, regions: Sequence[Mapping[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for region in regions:
            kind, field = region["type"], region["field"]
            mark = self._pass(region)
            if field in (TOOL_CALLS, BARE_CALL):
                # The mark of a call without the one before it is part of the call.
                text = region["text"] if kind == "region_chunk" else mark if field == BARE_CALL else ""
                if kind != "region_close" and text:
                    self._body.append(text)
                    self._add_calls(events, text)
                elif kind == "region_close":
                    self._close_calls(events, field, mark)
            elif field == REASONING and kind != "region_open":
                self._add_reasoning(events, region.get("text", ""), is_closed=kind == "region_close", mark=mark)
            elif kind == "region_chunk":
                self._add_text(events, region["text"], ContentDelta)
            elif field == REASONING:
                # Content before the reasoning is white space only.
                self._space, self._at_start = [], True
        return _joined(events)

    def _pass(self, region: Mapping[str, Any]) -> str:
        """Move past the text that a region's event stands for: a chunk, or the mark that opens or closes the region.
        The mark, empty where the answer has none."""
        if region["type"] == "region_chunk":
            num_chars, mark = len(region["text"]), ""
        elif region["type"] == "region_open" and self._opens_in_prompt:
            self._opens_in_prompt = False
            return ""
        else:
            begin, mark = mark_at(self._ahead, self._told, region, self._reasoning, self._tools)
            num_chars = begin + len(mark) - self._told if mark else 0
        self._told += num_chars
        self._position += num_chars
        return mark

    def _add_reasoning(self, events: list[Event], text: str, is_closed: bool, mark: str) -> None:
        """What more text of the reasoning, or its end, has. A call that nothing but the answer's end follows is one."""
        if not is_closed:
            self._add_text(events, self._thought_calls.feed(text), ReasoningDelta)
            return
        held = self._thought_calls.finish()
        found = [] if mark or not held else self._calls_in(held)
        if not found:
            self._add_text(events, held, ReasoningDelta)
        events += found
        self._space, self._at_start = [], True

    def _calls_in(self, text: str) -> list[Event]:
        """The events of text at the answer's end which has whole calls; none where it has none."""
        parser = RegionParser(None, self._tools, "", self._schemas, self._max_calls)
        parser._position = self._position - len(text)
        events = [*parser.feed(text), *parser.finish()]
        self._num_calls = parser._num_calls
        return events if any(isinstance(each, ToolCallDelta) and each.last and each.complete for each in events) else []

    def _add_text(self, events: list[Event], text: str, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        """Add text to a region, the last of which is where the parser is; white space at its end waits for what follows
        it."""
        if self._at_start:
            text = text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space += [text] if text else []
            return
        end = self._position - len(text) + len(shown)
        space, self._space = self._space, [text[len(shown) :]] if len(shown) < len(text) else []
        self._at_start = False
        shown = "".join([*space, shown])
        events.append(ContentDelta(shown, end) if kind is ContentDelta else ReasoningDelta(shown))

    def _add_calls(self, events: list[Event], text: str) -> None:
        """What more text of a region has of calls."""
        assert self._tools is not None
        if self._calls is None:
            self._calls = call_stream(self._tools, self._schemas)
        self._tell(events, self._calls.feed(text))

    def _tell(self, events: list[Event], pieces: Sequence[Piece]) -> None:
        """Tell of pieces of calls, but for calls that are too many."""
        assert self._tools is not None
        for name, arguments, complete in pieces:
            if name is not None:
                self._space, self._at_start = [], True
                self._call = ToolCallDelta(self._num_calls, self._tools.new_id(), name, "")
                self._num_calls += 1
            if self._max_calls is None or self._call.index < self._max_calls:
                first, last = name is not None, complete is not None
                call = replace(self._call, arguments=arguments, complete=complete is not False, first=first, last=last)
                events.append(call)

    def _close_calls(self, events: list[Event], field: str, mark: str) -> None:
        """The calls of a region that has ended with this mark, or where it is empty with the answer; its text, if it is
        none."""
        assert self._tools is not None
        if field == BARE_CALL and mark:
            self._body.append(BARE_CLOSE)
            self._add_calls(events, BARE_CLOSE)
        body, self._body = "".join(self._body), []
        stream, self._calls = self._calls, None
        if stream is not None and stream.begun:
            # A call that has only its name is one where it had to be one.
            pieces = [each for each in stream.finish() if each.name is None or each.complete or self._forced]
            self._tell(events, pieces)
            self._space, self._at_start = [], True
            return
        # The answer's end closes only regions that have no close mark.
        complete = bool(mark or not self._tools.close)
        calls = self._tools.read(body, self._schemas) if complete else None
        if calls is None:
            before = self._tools.open if field == TOOL_CALLS else ""
            after = mark if field == TOOL_CALLS else mark.removeprefix(BARE_CLOSE)
            self._add_text(events, before + body + after, ContentDelta)
            return
        self._tell(events, [Piece(call.name, call.arguments, True) for call in calls])
        self._space, self._at_start = [], True


def _joined(events: list[Event]) -> list[Event]:
    """The events, with texts that follow one another in one."""
    groups: list[list[Event]] = []
    for event in events:
        if groups and _goes_on(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [group[0] if len(group) == 1 else _one_of(group) for group in groups]


def _goes_on(last: Event, event: Event) -> bool:
    if isinstance(last, ContentDelta) and isinstance(event, ContentDelta):
        return last.end == event.end - len(event.text)
    return isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta)


def _one_of(group: Sequence[Event]) -> Event:
    text = "".join([event.text for event in group if not isinstance(event, ToolCallDelta)])
    last = group[-1]
    return ContentDelta(text, last.end) if isinstance(last, ContentDelta) else ReasoningDelta(text)
