"""Reasoning and tool calls in the text of answers: `select_output_format` once for a model, then a parser for each
answer."""

from dflash_openai.parsing.events import ContentDelta, Event, OutputParser, ReasoningDelta, ToolCallDelta
from dflash_openai.parsing.selection import OutputFormat, select_output_format

__all__ = [
    "ContentDelta",
    "Event",
    "OutputFormat",
    "OutputParser",
    "ReasoningDelta",
    "ToolCallDelta",
    "select_output_format",
]
