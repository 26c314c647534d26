"""The body of POST /v1/responses, and the chat request that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dflash_backend.text.client_json import quoted
from dflash_backend.text.tools import ToolError, check_function
from dflash_openai.errors import invalid, refusing
from dflash_openai.notices import log_once_of_client
from dflash_openai.responses_input import messages_of, seen_name
from dflash_openai.schemas import ChatRequest, SharedFields, text_in
from dflash_openai.tools import CLIENT_TYPES, is_of_type

# Fields that a chat request has by the same names.
SAME_NAMES = (
    *SharedFields.__struct_fields__,
    *("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "include_reasoning"),
)
# The parameters of a custom tool: the model writes its input as one text.
CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
LOGPROBS = "message.output_text.logprobs"
# What a client may ask to be included; the reasoning is always there, as text.
INCLUDED = ("reasoning.encrypted_content", LOGPROBS)
MAX_TOP_LOGPROBS = 20
# Fields that need a server that keeps responses or runs tools, with why they are refused.
STATEFUL = {
    "previous_response_id": "this server keeps no responses; send the whole conversation as 'input'",
    "conversation": "this server keeps no conversations; send the whole conversation as 'input'",
    "background": "this server keeps no responses; wait for the answer, or stream it",
    "prompt": "this server keeps no prompts; send 'instructions' and 'input'",
}
# What `include` may ask for of tools that OpenAI's servers run, and of images.
_OF_HOSTED = re.compile(r"[a-z_]+_call(_output)?\..*|message\.input_image\.image_url")


class ResponsesRequest(SharedFields, kw_only=True):
    """POST /v1/responses. The input and the tools are checked where they are turned into a chat."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    include: list[str] | None = None
    # Of the likeliest tokens at each position, 0 to 20, where `include` asks for log-probabilities.
    top_logprobs: int | None = None
    # Refused unless they ask for nothing.
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    # Taken, without effect: an input that does not fit is refused, and not cut.
    truncation: str | None = None
    # vLLM's: the response has the prompt and the answer as the model reads and writes them, with token ids.
    enable_response_messages: bool | None = None
    max_tool_calls: int | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat request that a request stands for. Raises `ApiError`."""
    _refuse_state(body)
    _check_include(body)
    fields = {name: getattr(body, name) for name in SAME_NAMES}
    return ChatRequest(
        messages=messages_of(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [tool for tool, _ in tools_of(body.tools)],
        response_format=_response_format(body.text or {}),
        logprobs=LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        reasoning_effort=text_in((body.reasoning or {}).get("effort"), "reasoning.effort"),
        store=body.store,
        **fields,
    )


def _refuse_state(body: ResponsesRequest) -> None:
    if body.store:
        raise invalid("'store' is true, but this server keeps no responses; leave it out or set it to false", "store")
    for name, why in STATEFUL.items():
        if getattr(body, name):
            raise invalid(f"'{name}' is not supported: {why}", name)


def _check_include(body: ResponsesRequest) -> None:
    for name in body.include or []:
        if _OF_HOSTED.fullmatch(name):
            _tell_ignored(name[:64])
        elif name not in INCLUDED:
            raise invalid(f"'include' has {name[:64]!r}; allowed: {', '.join(INCLUDED)}", "include")
    if not 0 <= (num_top := body.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
        raise invalid(f"'top_logprobs' is {num_top}; allowed: an integer from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    if num_top and LOGPROBS not in (body.include or ()):
        raise invalid(f"'top_logprobs' needs '{LOGPROBS}' in 'include'", "top_logprobs")


def _tell_ignored(name: str) -> None:
    log_once_of_client(f"include {name}", lambda: f"{name!r} in 'include' is ignored: this server has none of that")


class ClientTool(NamedTuple):
    """A tool as its client calls it: a function, by itself or of a namespace, or a custom tool, whose input is text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def tools_of(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], ClientTool]]:
    """The tools that a client runs, each in the form of chat completions, as the model sees it, and as the client calls
    it. Those that a server would have to run are left out. Raises `ApiError`."""
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "namespace":
            namespace, within = tool.get("name"), tool.get("tools") or []
            is_list = isinstance(within, list) and all(isinstance(each, Mapping) for each in within)
            if not isinstance(namespace, str) or not is_list:
                raise invalid(f"tools[{index}] is a namespace without a name, or whose 'tools' are no objects", "tools")
            for place, each in enumerate(within):
                if is_of_type(each, CLIENT_TYPES):
                    yield _chat_tool(each, f"tools[{index}].tools[{place}]", namespace)
        elif is_of_type(tool, CLIENT_TYPES):
            yield _chat_tool(tool, f"tools[{index}]")


def _chat_tool(tool: Mapping[str, Any], where: str, namespace: str | None = None) -> tuple[dict[str, Any], ClientTool]:
    """The tool that the client has at `where`. Chat completions put a function's fields into an object of their own.
    Raises `ApiError`."""
    fields = tool.get("function", {name: value for name, value in tool.items() if name != "type"})
    if not isinstance(fields, Mapping):
        raise invalid(f"{where}.function is {quoted(fields)}; allowed: an object with a name and parameters", "tools")
    with refusing(ToolError, "tools"):
        check_function(fields, f"{where}.function" if "function" in tool else where)
    own = ClientTool(fields["name"], namespace, tool.get("type") == "custom")
    fields = {**fields, "name": seen_name(own.name, namespace)}
    if own.is_custom:
        fields = {key: value for key, value in fields.items() if key in ("name", "description")}
        fields["parameters"] = CUSTOM_INPUT
    return {"type": "function", "function": fields}, own


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """`text.format` in the form of chat completions."""
    given = text.get("format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "json_schema":
        if given.get("schema") is None:
            raise invalid("'text.format' of the type json_schema needs a 'schema' beside its 'name'", "text.format")
        return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}
    raise invalid("'text.format' is not of the type text, json_object or json_schema", "text.format")
