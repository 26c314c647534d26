"""Chat messages on their way into a prompt: options of the chat template, and content that cannot pose as a turn.

A chat template marks turns by special tokens, such as `<|im_start|>`. Content that spells such a token must not begin a
turn: its author, perhaps a web page, would speak as the system. So a mark is put inside each such token before the
template runs, and the rendered text is split at the marks before it is tokenised: `<` and `|im_start|>` make no special
token. Content without special tokens is tokenised as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_backend.text.client_json import WITHOUT_TEXT, JsonError, quoted, read_json, texts
from dflash_backend.text.tools import ToolError, read_tools

# Unicode reserves these characters for use inside programs; they have no meaning in a text.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
OPTION_NAMES = ("chat_template_kwargs", "continue_final_message", "enable_thinking", "tools")
# What clients and chat templates call what the model has thought, the most usual first.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
MAX_TOOLS_CHARS = 65_536
MAX_TOOLS_BRACKETS = 5000
MAX_OPTIONS = 16
MAX_OPTIONS_CHARS = 4096
MAX_OPTIONS_BRACKETS = 100
# A template may write a role into the text as it is.
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_BETWEEN = "\0"
# White space at the end of a text before which the beginning of a special token is looked for.
MAX_SPACE = 64
# Of the types of parts of content, as `image_url` and `input_audio`.
_MEDIA = re.compile(r"image|audio|video|file")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Arguments of transformers' `apply_chat_template` that are no variables of the template.
_RESERVED = frozenset(
    [
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    ]
)


class PromptError(ValueError):
    """A prompt cannot be turned into token ids. The message is for the client."""


class TemplateRefusal(PromptError):
    """The chat template refuses the messages, which it might take in another form."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """The text of messages through a chat template, in `pieces`: split inside each special token that content spells.
    Each piece is tokenised by itself."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def pop_options(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the chat template out of a request's parameters: the variables of `chat_template_kwargs`, an
    object or its JSON text, `enable_thinking`, which stands for the variable of that name, `tools`, a list or its JSON
    text, and `continue_final_message`. Raises `PromptError`."""
    given = values.pop("chat_template_kwargs", None)
    thinking = values.pop("enable_thinking", None)
    continues = values.pop("continue_final_message", None)
    tools = values.pop("tools", None)
    options = _options(given)
    if thinking is not None:
        if "enable_thinking" in options:
            raise PromptError("'enable_thinking' was sent as a parameter and in 'chat_template_kwargs'; send it once")
        options["enable_thinking"] = _flag("enable_thinking", thinking)
    if continues is not None and _flag("continue_final_message", continues):
        options["continue_final_message"] = True
    if tools is not None:
        try:
            options["tools"] = read_tools(_value("tools", tools, MAX_TOOLS_CHARS, MAX_TOOLS_BRACKETS))
        except ToolError as error:
            raise PromptError(f"parameter {error}") from None
    return options


def _flag(name: str, given: Any) -> bool:
    if str(given)[:8].lower() not in ("true", "false", "1", "0"):
        raise PromptError(f"parameter '{name}' has the value {quoted(given)}; allowed: true or false")
    return str(given).lower() in ("true", "1")


def _value(name: str, given: Any, max_chars: int, max_brackets: int) -> Any:
    """What a parameter is, or the value of its JSON text."""
    try:
        return read_json(given, max_chars=max_chars, max_brackets=max_brackets) if isinstance(given, str) else given
    except JsonError as error:
        raise PromptError(f"parameter '{name}' {error}") from None


def _options(given: Any) -> dict[str, Any]:
    given = _value("chat_template_kwargs", given, MAX_OPTIONS_CHARS, MAX_OPTIONS_BRACKETS)
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_OPTIONS:
        raise PromptError(
            f"parameter 'chat_template_kwargs' has the value {quoted(given)}; allowed: an object of at most "
            f'{MAX_OPTIONS} variables of the chat template, such as {{"enable_thinking": false}}'
        )
    for name in given:
        if not isinstance(name, str) or not _OPTION.fullmatch(name) or name in _RESERVED:
            raise PromptError(
                f"parameter 'chat_template_kwargs' has the name {quoted(name)}; allowed: names of variables of the "
                "chat template, of letters, digits and '_', that the server does not set itself"
            )
    return dict(given)


def _any_of(texts: Collection[str]) -> str:
    """A pattern of any of these texts, the longest first. However many they are, each character is looked at once."""
    tails: dict[str, list[str]] = {}
    for text in filter(None, texts):
        tails.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in tails.items()]
    if "" in texts:
        branches.append("")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class SpecialTokens:
    """Finds the special tokens of a tokenizer in the content of messages."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # A token of one character cannot be split.
        tokens = [token for token in tokens if len(token) > 1]
        self._firsts = re.compile("[" + "".join({re.escape(token[0]) for token in tokens}) + "]") if tokens else None
        # Looking ahead also finds tokens that overlap.
        begins = [
            f"{re.escape(first)}(?={_any_of([token[1:] for token in tokens if token[0] == first])})"
            for first in sorted({token[0] for token in tokens})
        ]
        self._begins = re.compile("|".join(begins)) if tokens else None
        beginnings = _any_of({token[:length] for token in tokens for length in range(1, len(token))})
        self._longest = max(map(len, tokens), default=0)
        # A text that ends within a special token, which the text that a template puts after it could complete: of
        # several texts, joined, and of one. A token may begin with white space: each of a long run is looked at.
        self._ends = re.compile(rf"{beginnings}\s{{0,{self._longest + MAX_SPACE}}}{_BETWEEN}") if tokens else None
        self._end = re.compile(rf"{beginnings}\s*\Z")

    def marked(self, value: Any) -> tuple[Any, str | None]:
        """`value`, which consists of lists, mappings and texts, with a mark inside each special token that its texts
        spell out, and the character that is the mark; None where nothing had to be marked. Raises `PromptError`."""
        joined = _BETWEEN.join([*texts(value), ""])
        if self._begins is None or self._ends is None or not (self._begins.search(joined) or self._ends.search(joined)):
            return value, None
        mark = next((mark for mark in MARKS if mark not in joined), None)
        if mark is None:
            raise PromptError(
                "the messages have all of the characters U+FDD0 to U+FDEF, which are no characters of text"
            )
        return self._mark(value, mark), mark

    def _mark(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._begins is not None
            assert self._firsts is not None
            if not self._firsts.search(value):
                return value
            text = self._begins.sub(rf"\g<0>{mark}", value)
            if self._end.search(value, max(0, len(value) - self._longest - MAX_SPACE)):
                bare = text.rstrip()
                text = bare + mark + text[len(bare) :]
            return text
        if type(value) is dict or isinstance(value, Mapping):
            return {
                self._mark(key, mark): item if type(item) in WITHOUT_TEXT else self._mark(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [item if type(item) in WITHOUT_TEXT else self._mark(item, mark) for item in value]
        return value


def check_role(role: Any, where: str) -> None:
    """Raises `PromptError` for a role that is not one word, of the message `where`."""
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise PromptError(
            f"{where} has the role {quoted(role)}; allowed: a word such as system, user or assistant, of letters, "
            "digits, '_' and '-'"
        )


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `PromptError` unless the last message is the beginning of an answer, which a model can continue."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    has_text = any(text.strip() for text in texts(content))
    if last.get("role") != "assistant" or last.get("tool_calls") or not has_text:
        raise PromptError(
            "'continue_final_message' continues the last message, which must be of the role assistant, with the "
            "beginning of the answer as its content and without tool calls"
        )


def with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has each of the names that chat templates read: a client sends one of them."""
    found = next((text for name in REASONING_NAMES if isinstance(text := message.get(name), str)), None)
    if found is None:
        return dict(message)
    given = {name: value for name, value in message.items() if name not in REASONING_NAMES or value is not None}
    return {**dict.fromkeys(REASONING_NAMES, found), **given}


def refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `PromptError` for a part of content that is an image, a sound or a file: the template of a target that was
    trained with them writes their places, and nothing is read there."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and _MEDIA.search(kind):
                raise PromptError(
                    f"a message has a content part of the type {quoted(kind)}; this server reads text alone, such as "
                    '{"type": "text", "text": "Hello"}'
                )


def join_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is text: parts of text are joined by line ends, as vLLM joins them for a template that
    takes no parts. Raises `PromptError` for a part that is not text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise PromptError(
                f"a message has the content part {quoted(part)}; allowed with this model's chat template: text, such "
                'as {"type": "text", "text": "Hello"}'
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
