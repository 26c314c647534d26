"""Which formats a model writes reasoning and tool calls in: by its chat template, or as the operator says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dflash_openai.parsing import harmony
from dflash_openai.parsing.events import OutputParser
from dflash_openai.parsing.parser import PlainParser, RegionParser
from dflash_openai.parsing.reasoning_formats import MISTRAL as MISTRAL_REASONING
from dflash_openai.parsing.reasoning_formats import QWEN3, REASONING_FORMATS, ReasoningFormat
from dflash_openai.parsing.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHON_TAG,
    QWEN3_CODER,
    TOOL_FORMATS,
    ToolFormat,
)

_F = TypeVar("_F")
AUTO, NONE = "auto", "none"
_TOOL_PARSERS = TOOL_FORMATS | {harmony.TOOLS.name: harmony.TOOLS}
_REASONING_PARSERS = REASONING_FORMATS | {harmony.REASONING.name: harmony.REASONING}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes what is not content. tools, reasoning: None where it writes none. shows_special_tokens:
    whether its marks are special tokens, which detokenizing must not skip."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    shows_special_tokens: bool = False

    @property
    def is_harmony(self) -> bool:
        """Whether answers are in OpenAI's harmony format."""
        return self.tools is harmony.TOOLS or self.reasoning is harmony.REASONING

    def tail_of_message(self, content: str) -> str:
        """For a message that the model continues, the end of a prompt from which a parser knows where it is: in the
        reasoning where `content` has its open mark and not its close mark, else past it."""
        if self.is_harmony:
            return harmony.FINAL
        if self.reasoning is None:
            return ""
        in_reasoning = content.rfind(self.reasoning.open) > content.rfind(self.reasoning.close)
        return self.reasoning.open if in_reasoning else self.reasoning.close

    def parser(
        self,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        parallel_tool_calls: bool = True,
        forced: bool = False,
    ) -> OutputParser:
        """A parser for one answer to `prompt`, the text of the rendered chat. `tools` are the request's, in OpenAI's
        form; without them no tool call is looked for. Without `parallel_tool_calls` only the first call is returned.
        forced: a grammar allows the answer nothing but calls."""
        calls, max_calls = self.tools if tools else None, None if parallel_tool_calls else 1
        if self.is_harmony:
            return harmony.HarmonyParser(prompt, self.reasoning is not None, calls is not None, max_calls, forced)
        if self.reasoning is None and calls is None:
            return PlainParser()
        return RegionParser(self.reasoning, calls, prompt, function_schemas(tools), max_calls, forced)


def select_output_format(
    chat_template: str,
    special_tokens: Collection[str] = (),
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> OutputFormat:
    """The formats of a model with this chat template, empty where it has none.

    special_tokens: the texts of the tokens that detokenizing skips. tool_call_parser, reasoning_parser: vLLM's names,
    `auto` to choose by the template, `none` for none. Raises `ValueError` for another name.
    """
    tools = _named(tool_call_parser, _TOOL_PARSERS, _tool_format_of(chat_template), "tool-call-parser")
    reasoning = _named(reasoning_parser, _REASONING_PARSERS, _reasoning_format_of(chat_template), "reasoning-parser")
    marks = [mark for each in (tools, reasoning) if each is not None for mark in (each.open, each.close)]
    output = OutputFormat(tools, reasoning, any(mark in special_tokens for mark in marks))
    return replace(output, shows_special_tokens=True) if output.is_harmony else output


def function_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each function's parameters, by the function's name, of tools in OpenAI's form."""
    functions = [tool.get("function", tool) for tool in tools]
    return {each["name"]: each.get("parameters") or {} for each in functions if isinstance(each.get("name"), str)}


def _named(name: str, formats: Mapping[str, _F], by_template: _F | None, option: str) -> _F | None:
    if name == AUTO:
        return by_template
    if name == NONE:
        return None
    if name not in formats:
        raise ValueError(f"--{option} has the value {name!r}; allowed: {', '.join((AUTO, NONE, *formats))}")
    return formats[name]


def _tool_format_of(chat_template: str) -> ToolFormat | None:
    if "tools" not in chat_template:
        return None
    if harmony.is_harmony(chat_template):
        return harmony.TOOLS
    if "<function=" in chat_template and HERMES.open in chat_template:
        return QWEN3_CODER
    for known in (HERMES, MISTRAL):
        if known.open in chat_template:
            return known
    # Llama's templates write the calls of the history with this name of the arguments.
    if PYTHON_TAG in chat_template or '"parameters": ' in chat_template:
        return LLAMA3_JSON
    return None


def _reasoning_format_of(chat_template: str) -> ReasoningFormat | None:
    if harmony.is_harmony(chat_template):
        return harmony.REASONING
    for known in (QWEN3, MISTRAL_REASONING):
        if known.close in chat_template:
            return known
    return None
