"""System messages for chat templates that know one, at the beginning: several there become one, and where a template
refuses or drops a later one, it becomes a turn of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_backend.text.chat import ChatText, TemplateRefusal

BETWEEN = "\n\n"
Messages = Sequence[Mapping[str, Any]]


def with_one_system(messages: Messages) -> list[Mapping[str, Any]]:
    """Messages of which those of the system at the beginning are one, with an empty line between their texts."""
    num = _num_leading(messages)
    return [_joined(messages[:num]), *messages[num:]] if num > 1 else list(messages)


def rendered(messages: Messages, render: Callable[[Messages], ChatText]) -> ChatText:
    """What `render` makes of messages. Where it refuses or drops a system message behind the first turn, that message
    is a turn of the user; where a template takes no two of these in a row, they are one. Raises `PromptError`, of the
    messages as they were sent."""
    later = [message for message in messages[_num_leading(messages) :] if message.get("role") == "system"]
    if not later:
        return render(messages)
    wanted = [text.strip() for message in later for text in _texts_of(message.get("content"))]
    as_sent: ChatText | None = None
    refusal: TemplateRefusal | None = None
    for attempt in _attempts(messages):
        try:
            chat = render(attempt)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        if all(text in chat.text for text in wanted):
            return chat
        as_sent = as_sent or chat
    if as_sent is None:
        assert refusal is not None
        raise refusal
    return as_sent


def _attempts(messages: Messages) -> Iterator[Messages]:
    yield messages
    num = _num_leading(messages)
    turns = [{**each, "role": "user"} if each.get("role") == "system" else each for each in messages[num:]]
    yield [*messages[:num], *turns]
    groups: list[list[Mapping[str, Any]]] = []
    for each in turns:
        if groups and each.get("role") == groups[-1][-1].get("role") == "user":
            groups[-1].append(each)
        else:
            groups.append([each])
    yield [*messages[:num], *(_joined(group) if len(group) > 1 else group[0] for group in groups)]


def _num_leading(messages: Messages) -> int:
    """How many messages of the system are at the beginning."""
    return next((place for place, each in enumerate(messages) if each.get("role") != "system"), len(messages))


def _joined(messages: Messages) -> dict[str, Any]:
    """One message with the content of all: a text, or parts where some of them are no text."""
    contents = [content for each in messages if (content := each.get("content"))]
    parts = [part for content in contents for part in _parts(content)]
    if len(parts) == sum(len(_texts_of(content)) for content in contents):
        return {**messages[0], "content": BETWEEN.join("\n".join(_texts_of(content)) for content in contents)}
    as_parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {**messages[0], "content": as_parts}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _texts_of(content: Any) -> list[str]:
    """The texts of content, a text or a list of parts, of which some may be no text."""
    found = [part.get("text") if isinstance(part, Mapping) else part for part in _parts(content)]
    return [text for text in found if isinstance(text, str)]
