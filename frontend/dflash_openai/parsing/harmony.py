"""OpenAI's harmony format, which gpt-oss writes: an answer is several messages, each with a channel.

    <|channel|>analysis<|message|>I see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>

`analysis` is reasoning, `final` and `commentary` are content, and a message to a function is a call, whatever its
channel. The marks are special tokens of the checkpoint's own tokenizer, found here in the detokenized text: OpenAI's
package `openai-harmony` reads the format by token ids of a vocabulary that it downloads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_openai.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta
from dflash_openai.parsing.reasoning_formats import ReasoningFormat
from dflash_openai.parsing.tool_formats import ToolCall, ToolFormat, held_back, is_object

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (START, CHANNEL, "<|constrain|>", MESSAGE, *ENDS)
LONGEST_MARK = max(map(len, MARKS))
FUNCTIONS = "functions."
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
# The head of a call whose name is whole. Of a longer name each place would be looked at again and again.
_BEGUN_RECIPIENT = re.compile(rf"(?:^|[\s>])to={re.escape(FUNCTIONS)}([^\s<]{{1,128}}+)(?=[\s<])")
# What ends a head, and a body.
_HEAD_MARKS, _BODY_MARKS = (START, MESSAGE, *ENDS), (START, *ENDS)
_HEAD_MARK, _BODY_MARK = (re.compile("|".join(map(re.escape, marks))) for marks in (_HEAD_MARKS, _BODY_MARKS))

# By vLLM's names. The final message is what a grammar begins with.
REASONING = ReasoningFormat(
    "openai_gptoss", f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}", counted_to="<|end|>"
)
# The head of a message of the assistant to the user.
FINAL = f"{START}assistant{REASONING.close}"


def _read(text: str, schemas: object) -> list[ToolCall] | None:
    """The call of a message from the name of its function on."""
    head, _, body = text.partition(MESSAGE)
    arguments = arguments_of(body)
    name = re.match(r"[^\s<]*", head)
    return None if arguments is None or not name or not name[0] else [ToolCall(name[0], arguments)]


TOOLS = ToolFormat("openai", f"{CHANNEL}commentary to={FUNCTIONS}", "<|call|>", _read)


def is_harmony(chat_template: str) -> bool:
    """Whether a chat template writes conversations in this format."""
    return CHANNEL in chat_template and MESSAGE in chat_template


def arguments_of(body: str) -> str | None:
    """The arguments of a call, the JSON text of an object; None where the text is none."""
    arguments = body.strip() or "{}"
    return arguments if is_object(arguments) else None


class HarmonyParser:
    """Parses one answer, as `OutputParser`. prompt: the text that the model continues, at least from its last `START`
    on. With `reasoning` the text of the channel `analysis` is reasoning, else content; with `calls` messages to
    functions are calls, of which at most `max_calls` are returned, all where it is None. forced: a grammar allows
    nothing but reasoning and a call, so that a call may break off, and nothing is content."""

    def __init__(
        self, prompt: str, reasoning: bool, calls: bool, max_calls: int | None = None, forced: bool = False
    ) -> None:
        self._reasoning, self._calls, self._max_calls, self._forced = reasoning, calls, max_calls, forced
        # Text that has not been told of, and where it begins in the answer.
        self._ahead, self._position = "", 0
        # The beginning of a message as far as it has come; None within its body.
        self._head: list[str] | None = []
        self._is_reasoning, self._function = False, ""
        # A message to a function as far as it has come, and whether that begins with more than white space.
        self._body: list[str] = []
        self._body_begun = False
        # The call that is being written, and white space at the end of its arguments so far.
        self._call: ToolCallDelta | None = None
        self._space: list[str] = []
        self._num_messages = self._num_calls = 0
        self._reasoned = False
        head, mark, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if mark and not any(end in head for end in ENDS):
            self._begin(head)

    def feed(self, text: str) -> list[Event]:
        """As `OutputParser.feed`."""
        text, self._ahead = self._ahead + text, ""
        at = 0
        events: list[Event] = []
        while True:
            in_head = self._head is not None
            found = (_HEAD_MARK if in_head else _BODY_MARK).search(text, at)
            if found is None:
                marks = _HEAD_MARKS if in_head else _BODY_MARKS
                end = len(text) - held_back(text[max(at, len(text) - LONGEST_MARK) :], marks)
                self._take(text[at:end], events)
                self._ahead = text[end:]
                return events
            self._take(text[at : found.start()], events)
            at = found.end()
            if self._head is None:
                self._close(events)
            elif found[0] == MESSAGE:
                self._begin("".join(self._head))
            else:
                self._head = []
            self._position += len(found[0])

    def finish(self) -> list[Event]:
        """As `OutputParser.finish`. The end of the last message is not in the text, since it ended the answer."""
        events: list[Event] = []
        text, self._ahead = self._ahead, ""
        self._take(text, events)
        head = "".join(self._head or [])
        if self._head is None:
            self._close(events)
        elif self._forced:
            if begun := _BEGUN_RECIPIENT.search(head):
                events.append(ToolCallDelta(self._num_calls, TOOLS.new_id(), begun[1], "", complete=False))
        elif head and not self._num_messages and not head.lstrip().startswith((CHANNEL, "to=")):
            # A model that does not write in this format.
            events.append(ContentDelta(head, self._position))
        self._head = []
        return events

    def _begin(self, head: str) -> None:
        """The body of a message with this head begins."""
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        self._head, self._body, self._body_begun = None, [], False
        self._num_messages += 1
        self._function = recipient[1].removeprefix(FUNCTIONS) if recipient and self._calls else ""
        self._is_reasoning = self._reasoning and channel is not None and channel[1] == "analysis"
        if self._is_reasoning and self._reasoned:
            self._body = ["\n"]  # between two messages of it

    def _take(self, text: str, events: list[Event]) -> None:
        """The next text is of the head or of the body."""
        self._position += len(text)
        if self._head is not None:
            self._head.append(text)
        elif self._function:
            self._body.append(text)
            self._add_arguments(text, events)
        elif text and self._is_reasoning:
            events.append(ReasoningDelta("".join([*self._body, text])))
            self._body, self._reasoned = [], True
        elif text and not self._forced:
            events.append(ContentDelta(text, self._position))

    def _add_arguments(self, text: str, events: list[Event]) -> None:
        """More of the body of a message to a function; one that begins as an object is a call from there on."""
        first = self._call is None
        if first:
            text = text.lstrip()
            is_call = text.startswith("{") and not self._body_begun
            self._body_begun = self._body_begun or bool(text)
            if not is_call:
                return
            self._begin_call()
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return
        space, self._space = self._space, [text[len(shown) :]]
        self._tell(events, "".join([*space, shown]), first=first)

    def _begin_call(self) -> None:
        self._call = ToolCallDelta(self._num_calls, TOOLS.new_id(), self._function, "")
        self._num_calls += 1

    def _tell(
        self, events: list[Event], arguments: str, complete: bool = True, first: bool = False, last: bool = False
    ) -> None:
        """Tell of more of the call, unless it is one too many."""
        assert self._call is not None
        if self._max_calls is None or self._call.index < self._max_calls:
            events.append(replace(self._call, arguments=arguments, complete=complete, first=first, last=last))

    def _close(self, events: list[Event]) -> None:
        """The body ends."""
        body = "".join(self._body)
        if self._call is not None:
            complete = arguments_of(body) is not None
            self._tell(events, "" if complete else "".join(self._space), complete, last=True)
        elif self._function and (self._forced or not body.strip()):
            # Without arguments, unless a grammar has the model write an object, however empty.
            self._begin_call()
            self._tell(events, body if self._forced else "{}", not self._forced, first=True, last=True)
        elif self._function:
            events.append(ContentDelta(body, self._position))
        self._head, self._function, self._body = [], "", []
        self._call, self._space = None, []


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as the chat template of gpt-oss reads them: reasoning is `thinking`. With a call it takes either
    reasoning or content, which it writes as reasoning too, so both are one text there."""
    return [_template_message(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    thinking = message.get("thinking") or message.get("reasoning_content")
    if not isinstance(thinking, str):
        return message
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, "thinking": f"{thinking}\n{content}", "content": ""}
    return {**message, "thinking": thinking}
