"""The body of POST /v1/messages, Anthropic's, and the chat request that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dflash_backend.text.chat import PromptError, check_role
from dflash_backend.text.client_json import quoted
from dflash_backend.text.tools import ToolError, check_function
from dflash_openai.errors import ApiError, invalid, refusing
from dflash_openai.notices import log_once, log_once_of_client
from dflash_openai.parsing.tool_formats import is_object
from dflash_openai.schemas import ChatRequest, SharedFields, text_in
from dflash_openai.tools import is_of_type

# What a client of this endpoint calls a parameter of the model.
CLIENT_NAMES = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
}
# Claude Code puts a block with a number of its own for each request before its system prompt; with it no prefix of a
# prompt would be found again.
BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that a chat request has by the same names.
_SAME_NAMES = (*SharedFields.__struct_fields__, "chat_template_kwargs", "enable_thinking")


class CountTokensRequest(SharedFields, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # Of the beta.
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # Taken, without effect.
    cache_control: dict[str, Any] | None = None
    container: Any = None
    context_management: Any = None
    inference_geo: str | None = None
    speed: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages. Messages and tools are checked where they are turned into a chat."""

    max_tokens: int
    stop_sequences: list[str] | None = None


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """The chat request that a request stands for. Raises `ApiError`."""
    fields = {name: getattr(body, name) for name in _SAME_NAMES}
    config = body.output_config or {}
    choice, parallel = _tool_choice(body.tool_choice or {"type": "auto"})
    if (thinking := _thinking(body.thinking)) is not None and body.enable_thinking is None:
        fields["enable_thinking"] = thinking
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or body.stop}
    messages = messages_of(body.messages, body.system)
    continues = messages[-1]["role"] == "assistant"
    if continues and ("tool_calls" in messages[-1] or not messages[-1]["content"].strip()):
        raise invalid(
            "the last message is the assistant's, so it is the beginning of the answer, which needs text and has no "
            "tool_use; send the message that follows it, such as one with the tool_result",
            "messages",
        )
    return ChatRequest(
        messages=messages,
        tools=_chat_tools(body.tools or []),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(body.output_format if config.get("format") is None else config["format"]),
        reasoning_effort=text_in(config.get("effort"), "output_config.effort"),
        # The answer goes on from a message of the assistant at the end, and does not repeat it.
        continue_final_message=continues,
        **fields,
    )


def messages_of(given: Sequence[Mapping[str, Any]], system: Any) -> list[dict[str, Any]]:
    """The messages of a chat, the system prompt first. Raises `ApiError`."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        texts = [_text_of(block, f"system[{index}]") for index, block in enumerate(blocks)]
        messages.append({"role": "system", "content": "\n".join(t for t in texts if not t.startswith(BILLING))})
    if not given:
        raise invalid("'messages' is an empty list", "messages")
    for index, message in enumerate(given):
        with refusing(PromptError, f"messages[{index}].role"):
            check_role(message.get("role"), f"messages[{index}]")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": message.get("role"), "content": content})
        elif isinstance(content, list):
            _add(messages, message.get("role"), content, f"messages[{index}].content")
        else:
            raise invalid(f"messages[{index}] has no content: a text or a list of blocks", f"messages[{index}].content")
    return _combined(messages)


def _combined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which those of the user, or of the assistant, that follow one another are one, as Anthropic's API has
    it: some chat templates take no two of them."""
    found: list[dict[str, Any]] = []
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        turns = list(group)
        if len(turns) == 1 or role not in ("user", "assistant"):
            found += turns
            continue
        turn = {"role": role, "content": "\n".join(each["content"] for each in turns if each["content"])}
        if calls := [call for each in turns for call in each.get("tool_calls", ())]:
            turn["tool_calls"] = calls
        if thoughts := "".join(each.get("reasoning", "") for each in turns):
            turn["reasoning"] = thoughts
        found.append(turn)
    return found


def _add(messages: list[dict[str, Any]], role: Any, blocks: Sequence[Any], where: str) -> None:
    """Add one message of blocks: a message, and one before it for each result of a tool."""
    texts: list[str] = []
    thoughts: list[str] = []
    fields: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            fields.setdefault("tool_calls", []).append(_call(block, at))
        elif kind == "tool_result":
            given = block.get("content") or ""
            parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
            if not isinstance(parts, list):
                raise invalid(f"{at}.content is {quoted(given)}; allowed: a text or a list of blocks", f"{at}.content")
            text = _joined(parts, f"{at}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking":
            continue
        elif isinstance(kind, str) and (kind == "server_tool_use" or kind.endswith("_tool_result")):
            _leave_out(kind[:64])
        else:
            texts.append(_text_of(block, at))
    if thoughts:
        fields["reasoning"] = "".join(thoughts)
    messages += results
    if texts or fields or not results:
        messages.append({"role": role, "content": "\n".join(texts), **fields})


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block `tool_use` as chat completions write it. Raises `ApiError`."""
    name, given = block.get("name"), block.get("input") or {}
    if not isinstance(name, str):
        raise invalid(f"{where}.name is {quoted(name)}; allowed: the name of a tool", f"{where}.name")
    if not isinstance(given, str | Mapping):
        raise invalid(f"{where}.input is {quoted(given)}; allowed: an object", f"{where}.input")
    return {"id": block.get("id"), "type": "function", "function": {"name": name, "arguments": given}}


def _text_of(block: Any, where: str) -> str:
    """The text of a block: of text, of a search result, or of a document that is text, with what is said of it. Raises
    `ApiError`."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "search_result" and isinstance(block.get("content"), list):
        return _headed(block, ("title", "source"), _joined(block["content"], f"{where}.content"))
    source = block.get("source") if kind == "document" else None
    if isinstance(source, Mapping):
        data = source.get({"text": "data", "content": "content"}.get(str(source.get("type")), ""))
        if isinstance(data, list) and source.get("type") == "content":
            data = _joined(data, f"{where}.source.content")
        if isinstance(data, str):
            return _headed(block, ("title", "context"), data)
    raise _no_text(kind, where)


def _joined(parts: Sequence[Any], where: str) -> str:
    return "\n".join(_text_of(part, f"{where}[{place}]") for place, part in enumerate(parts))


def _headed(block: Mapping[str, Any], names: Sequence[str], text: str) -> str:
    """A text below what its block says of it, which Anthropic's models see too."""
    return "\n".join([*(head for name in names if (head := block.get(name)) and isinstance(head, str)), text])


def _no_text(kind: Any, where: str) -> ApiError:
    what = {"image": "is an image", "document": "is a document that is no text"}.get(
        str(kind), f"is a block of the type {quoted(kind)}, or has no text"
    )
    return invalid(
        f"{where} {what}; this server's model reads text alone. Allowed: text, thinking, tool_use, tool_result, "
        "search_result and documents of text",
        where,
    )


def _chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the form of chat completions. Those that Anthropic defines are left out: the model does not know
    them."""
    found = []
    for index, tool in enumerate(tools):
        if not is_of_type(tool, ("custom",)):
            continue
        with refusing(ToolError, "tools"):
            check_function(tool, f"tools[{index}]", "input_schema")
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
        found.append({"type": "function", "function": function})
    return found


def _leave_out(kind: str) -> None:
    log_once_of_client(
        f"block {kind}", lambda: f"blocks of the type {kind!r} are left out: this server runs no tools itself"
    )


def _tool_choice(choice: Mapping[str, Any]) -> tuple[Any, bool]:
    """OpenAI's `tool_choice` and `parallel_tool_calls`. Raises `ApiError`."""
    kind, parallel = choice.get("type"), choice.get("disable_parallel_tool_use") is not True
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind], parallel
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, parallel
    raise invalid(
        f"'tool_choice' is {quoted(choice)}; allowed: an object of the type auto, any, none, or tool with a 'name'",
        "tool_choice",
    )


def _thinking(given: Mapping[str, Any] | None) -> bool | None:
    """Whether the model is to think; None where the chat template decides. Raises `ApiError`."""
    if given is None:
        return None
    kind = given.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise invalid(f"'thinking.type' is {quoted(kind)}; allowed: enabled, adaptive and disabled", "thinking.type")
    if given.get("budget_tokens") is not None:
        log_once("thinking.budget_tokens", lambda: "'thinking.budget_tokens' is ignored: thinking has no length here")
    return bool(kind != "disabled")


def _response_format(given: Any) -> dict[str, Any] | None:
    """OpenAI's form of `output_config.format`. Raises `ApiError`."""
    if given is None:
        return None
    schema = given.get("schema") if isinstance(given, Mapping) and given.get("type") == "json_schema" else None
    if schema is None:
        raise invalid("'output_config.format' is not of the type json_schema with a 'schema'", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def arguments_of(text: str) -> Any:
    """The JSON text of a call's arguments as an object; empty where the answer broke off before its end."""
    return msgspec.Raw(text.encode()) if is_object(text) else {}
