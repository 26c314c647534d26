"""The input of a response, a text or a list of items, as the messages of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_backend.text.chat import PromptError, check_role
from dflash_backend.text.client_json import quoted
from dflash_openai.errors import ApiError, invalid, refusing
from dflash_openai.notices import log_once_of_client

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ITEMS = "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output and reasoning"
# Of tools that a server ran.
_HOSTED = re.compile(r"\w+_call(_output)?|mcp_\w+|tool_search_\w+")


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of an input, the instructions first. Reasoning, an answer's text and its calls that follow one
    another are one message of the assistant. Raises `ApiError`."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise invalid("'input' is an empty list", "input")
    for index, item in enumerate(given):
        _add(messages, index, item)
    return messages


def seen_name(name: Any, namespace: Any) -> Any:
    """What the model calls a tool of a namespace; names of tools have no dot of their own."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _add(messages: list[dict[str, Any]], index: int, item: Mapping[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role, text = _role(index, item.get("role")), _text(index, item.get("content"))
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
            last["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        if not isinstance(item.get("name"), str):
            raise _wrong(index, f"has the name {quoted(item.get('name'))}; allowed: the name of a function")
        if not isinstance(arguments, str | Mapping | None):
            raise _wrong(index, f"has the arguments {quoted(arguments)}; allowed: the JSON text of an object")
        function = {"name": seen_name(item["name"], item.get("namespace")), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(index, item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        # Reasoning that another server has encrypted has no text.
        if text := _text(index, item.get("content") or item.get("summary") or []):
            messages.append({"role": "assistant", "content": "", "reasoning": text})
    elif kind == "item_reference":
        raise _wrong(
            index,
            "has the type 'item_reference', but this server keeps no responses: send the item itself. Clients do so "
            "with 'store' set to false",
        )
    elif isinstance(kind, str) and _HOSTED.fullmatch(kind):
        kind = kind[:64]
        log_once_of_client(
            f"item {kind}", lambda: f"items of the type {kind!r} are left out: this server runs no tools itself"
        )
    else:
        raise _wrong(index, f"has the type {str(kind)[:64]!r}; allowed: {ITEMS}")


def _role(index: int, role: Any) -> str:
    with refusing(PromptError, f"input[{index}]"):
        check_role(role, f"input[{index}]")
    return str(role)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a tool call belongs to: the last one, where it is the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(index: int, content: Any) -> str:
    """The text of content: as it is, or of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(index, "has no text; allowed: a text or a list of parts of text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or kind not in (*TEXT_PARTS, "refusal"):
            raise _wrong(index, f"has a part of the type {str(kind)[:64]!r}; allowed: text, such as input_text")
        texts.append(text)
    return "\n".join(texts)


def _wrong(index: int, what: str) -> ApiError:
    return invalid(f"input[{index}] {what}", f"input[{index}]")
