"""Functions that a model may call, in OpenAI's form, and calls in a conversation, on their way to a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_backend.text.client_json import JsonError, count_parts, quoted, read_json

MAX_TOOLS = 128
MAX_ARGUMENTS_CHARS = 65_536
MAX_ARGUMENTS_BRACKETS = 5000
# Brackets and commas in the arguments of all calls of a conversation.
MAX_ARGUMENTS_PARTS = 50_000
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ToolError(ValueError):
    """Tools or tool calls are malformed. The message is for the client."""


def read_tools(value: Any, positions: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The tools of a request, a list of `{"type": "function", "function": {"name": ..., "parameters": {...}}}`, without
    fields that are null. `positions`: where each was in the client's list, of which some were left out. Raises
    `ToolError`."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ToolError(f"'tools' has the value {quoted(value)}; allowed: a list of at most {MAX_TOOLS} functions")
    tools = [_tool(index, tool) for index, tool in zip(positions or range(len(value)), value, strict=True)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ToolError(f"'tools' has the function {quoted(twice)} twice")
    return tools


def _tool(index: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{index}]"
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ToolError(f"{where} is {quoted(tool)}; allowed: an object of the type function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ToolError(f"{where}.function is {quoted(function)}; allowed: an object with a name and parameters")
    check_function(function, f"{where}.function")
    given = {field: value for field, value in function.items() if value is not None}
    return {**tool, "type": "function", "function": given}


def check_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> None:
    """Raise `ToolError` for a name or parameters that no function has. The client has the function at `where`, and its
    parameters there by the name `schema`."""
    name, parameters = function.get("name"), function.get(schema)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolError(f"{where}.name is {quoted(name)}; allowed: 1 to 128 letters, digits and characters of '_-.:'")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ToolError(f"{where}.{schema} is {quoted(parameters)}; allowed: a JSON schema, an object")


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]], name: str | None = None) -> list[Mapping[str, Any]]:
    """The messages with the arguments of their tool calls as objects, which templates take; clients send the JSON text
    that they got. A text that is no JSON object, as a model writes it whose answer breaks off, stays as it is, or with
    `name` becomes an object with that one argument: a client sends it again with each turn that follows. An empty list
    of calls is left out. Raises `ToolError`."""
    _check_arguments(messages)
    return [_with_calls(index, message, name) for index, message in enumerate(messages)]


def _with_calls(index: int, message: Mapping[str, Any], name: str | None) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    if not calls:
        # Templates look for the field: Llama's and gpt-oss's refuse a message that has it and no call.
        return {field: value for field, value in message.items() if field != "tool_calls"}
    return {**message, "tool_calls": [_parsed(index, call, name) for call in calls]}


def has_unread_arguments(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool call of `with_parsed_arguments` has its arguments as a text still."""
    return any(
        isinstance(call["function"]["arguments"], str)
        for message in messages
        if isinstance(calls := message.get("tool_calls"), list)
        for call in calls
    )


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Each text of arguments is measured as it is read. A conversation may have thousands of them."""
    parts = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                parts += sum(count_parts(arguments, 0, 0))
    if parts > MAX_ARGUMENTS_PARTS:
        raise ToolError(
            f"the arguments of all tool calls have {parts} brackets and commas outside of strings; allowed: "
            f"{MAX_ARGUMENTS_PARTS}"
        )


def _parsed(index: int, call: Any, name: str | None) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ToolError(
            f"message {index} has the tool call {quoted(call)}; allowed: an object with a function that has a name and "
            "arguments"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        read = _read_arguments(arguments)
        arguments = read if read is not None else arguments if name is None else {name: arguments}
    elif not isinstance(arguments, Mapping):
        raise ToolError(
            f"message {index} has a tool call with the arguments {quoted(arguments)}; allowed: an object, or its JSON "
            "text"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(text: str) -> Mapping[str, Any] | None:
    """The object of a JSON text; None where it is none."""
    if not text.strip():
        return {}
    try:
        arguments = read_json(text, max_chars=MAX_ARGUMENTS_CHARS, max_brackets=MAX_ARGUMENTS_BRACKETS)
    except JsonError:
        return None
    if arguments is None:  # the text null, as Go writes a map that was never made
        return {}
    return arguments if isinstance(arguments, Mapping) else None
