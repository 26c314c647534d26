"""What a chat request says of tools: which the model sees, and whether it must call one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_backend.messages import StructuredOutputs
from dflash_backend.text.client_json import quoted
from dflash_backend.text.tools import ToolError, read_tools
from dflash_openai.errors import invalid, refusing
from dflash_openai.notices import log_once_of_client
from dflash_openai.parsing import OutputFormat
from dflash_openai.parsing.grammar import NoGrammar, grammar_of_calls
from dflash_openai.schemas import ChatRequest

_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...} with the '
    "names of tools of the request"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`offered`: the tools that the model sees, in OpenAI's form; empty where it may call none. `forced`: whether it
    must call one of them. `parallel`: whether it may call several at once. `named`: whether the request names the one
    that it must call."""

    offered: Sequence[Mapping[str, Any]] = ()
    forced: bool = False
    parallel: bool = True
    named: bool = False

    def grammar(
        self, output: OutputFormat, special_token_ids: Mapping[str, int], wanted: StructuredOutputs | None = None
    ) -> str:
        """The grammar of an answer that must call a tool, or else be as `wanted`. Raises `ApiError`."""
        assert output.tools is not None
        functions = [tool["function"] for tool in self.offered]
        try:
            return grammar_of_calls(output.tools, functions, self.parallel, special_token_ids, wanted)
        except NoGrammar as error:
            raise invalid(str(error), "tools" if wanted else "tool_choice") from None
        except RecursionError:
            raise invalid("a function has parameters whose schema is nested too deeply", "tools") from None


NO_TOOLS = ToolUse()
# Tools that the client runs; all other types are run by servers such as OpenAI's. This server runs none, so those are
# left out.
CLIENT_TYPES = ("function", "custom")


def is_of_type(tool: Mapping[str, Any], types: Sequence[str]) -> bool:
    """Whether a tool has one of these types, or none at all; the log tells once of another. Raises `ApiError` for a
    type that is no text."""
    kind = tool.get("type")
    if kind is None or kind in types:
        return True
    if not isinstance(kind, str):
        raise invalid(f"'tools' has a tool of the type {quoted(kind)}; allowed: a text such as {types[0]}", "tools")
    kind = kind[:64]
    log_once_of_client(
        f"tool {kind}", lambda: f"tools of the type {kind!r} are left out: this server runs no tools itself"
    )
    return False


def read_tool_use(body: ChatRequest, output: OutputFormat) -> ToolUse:
    """What a request says of tools, for a model that writes its answers as `output` says. Raises `ApiError`."""
    tools = _tools(body.tools or [])
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if choice == "none" or (choice == "auto" and not tools):
        return NO_TOOLS
    if not tools:
        raise invalid("'tool_choice' needs 'tools' that the client runs", "tool_choice")
    if output.tools is None:
        raise invalid(
            "this model's chat template takes no tools, or none in a form that the front end knows; leave them out, or "
            "set 'tool_choice' to none",
            "tools",
        )
    forced, names = _read_choice(choice)
    named = isinstance(choice, Mapping) and choice.get("type") in CLIENT_TYPES
    offered = tools if names is None else [tool for tool in tools if tool["function"]["name"] in names]
    if names is not None and len(offered) < len(names):
        missing = next(name for name in names if name not in [tool["function"]["name"] for tool in tools])
        raise invalid(f"'tool_choice' names the function {missing!r}, which 'tools' does not have", "tool_choice")
    return ToolUse(offered, forced, body.parallel_tool_calls is not False, named)


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those that the client runs. Raises `ApiError`."""
    positions = [index for index, tool in enumerate(given) if is_of_type(tool, CLIENT_TYPES)]
    for index in positions:
        if given[index].get("type") == "custom":
            raise invalid(
                f"tools[{index}] is of the type custom, which only /v1/responses takes; send a function with one "
                "parameter of the type string",
                "tools",
            )
    with refusing(ToolError, "tools"):
        found = read_tools([given[index] for index in positions], positions)
    return found


def _read_choice(choice: Any) -> tuple[bool, set[str] | None]:
    """Whether a tool must be called, and the names of those that may be; None for all. Raises `ApiError`."""
    if choice in ("auto", "required"):
        return choice == "required", None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in CLIENT_TYPES and (name := _name(choice)):
        return True, {name}
    allowed = choice.get("allowed_tools", choice) if kind == "allowed_tools" else None
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
        names = {_name(tool) for tool in allowed["tools"] if not _is_hosted(tool)}
        mode = allowed.get("mode", "auto")
        if names and None not in names and mode in ("auto", "required"):
            return mode == "required", {name for name in names if name is not None}
    raise invalid(f"'tool_choice' is not one of {_CHOICES}", "tool_choice")


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "function") not in CLIENT_TYPES


def _name(tool: Any) -> str | None:
    """The function's name, as chat completions write it, or as responses do."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
