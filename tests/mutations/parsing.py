"""Defects of the parsing of reasoning and tool calls: clients would get other text than the model wrote."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FRONTEND = "frontend/dflash_openai"
TOOLS = ("tests/frontend/test_tools.py",)

PARSING_MUTANTS = mutants_of(
    f"{FRONTEND}/parsing/parser.py",
    ("tests/frontend/test_parsing.py",),
    (
        "the text of a region that is no tool call is lost",
        "self._add_text(events, before + body + after, ContentDelta)",
        "pass",
    ),
    (
        "a tool call that the answer's end breaks off gets a close mark",
        "complete = bool(mark or not self._tools.close)",
        "complete, mark = True, self._tools.close",
    ),
    (
        "a call that ends the reasoning is lost",
        "found = [] if mark or not held else self._calls_in(held)",
        "found = list[Event]()",
    ),
    (
        "a call that the reasoning is about is one",
        "found = [] if mark or not held else",
        "found = [] if not held else",
    ),
    (
        "white space that divides two texts of content is lost",
        'shown = "".join([*space, shown])\n        events',
        "events",
    ),
    (
        "reasoning that its prompt has ended is looked for",
        "if reasoning is not None and reasoning.is_closed_after(prompt):",
        "if reasoning is not None and prompt == reasoning.close:",
    ),
)

PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/parsing/regions.py",
    ("tests/frontend/test_parsing.py",),
    (
        "reasoning is looked for behind content",
        'opening = rf"\\A\\s*{re.escape(reasoning.open)}"',
        'opening = rf"\\s*{re.escape(reasoning.open)}"',
    ),
    ("a close mark in a string cuts a call in two", "        return self._reader.in_text\n", "        return False\n"),
    ("a call without its open mark is text", "if tools is QWEN3_CODER and (names", "if False and (names"),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/parsing/tool_formats.py",
    ("tests/frontend/test_parsing.py",),
    ("text that may be null becomes a number", "if types is not None and takes_text and not", "if False and not"),
    ("alternatives say nothing of a value", 'for name in ("anyOf", "oneOf"):', "for name in ():"),
)

PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/parsing/call_streams.py",
    ("tests/frontend/test_parsing.py",),
    (
        "a bracket within a string of the arguments ends them",
        "self._in_string = sign != '\"'",
        "self._in_string = False",
    ),
    ("an escaped quote at the end of a part ends a string", "self._escaped = True", "self._escaped = False"),
    ("arguments that broke off are complete", 'return [Piece(None, "", False)]', 'return [Piece(None, "", True)]'),
    ("calls of Llama's may name any function", "schemas.keys() if format is LLAMA3_JSON else None", "None"),
    ("the mark that may end a text is text", "end = max(self._at, len(self._text) - held)", "end = len(self._text)"),
    ("values of numbers are texts", "allowed_types(self._schema) == TEXT", "True"),
    (
        "arguments come when they are whole",
        "if end is None:\n                break",
        "if end is None:\n                pieces = []\n                break",
    ),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/messages.py",
    ("tests/frontend/test_tools.py",),
    ("each part of a call begins it anew", "if not event.first:", "if False:"),
)

PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/conversation.py",
    TOOLS,
    (
        "a grammar begins before the reasoning",
        "if output.reasoning is not None and not output.reasoning.is_closed_after(tail) and not in_grammar:",
        "if output.reasoning is None:",
    ),
    (
        "a grammar waits for the end of a reasoning that the prompt has ended",
        "if output.reasoning is not None and not output.reasoning.is_closed_after(tail) and not in_grammar:",
        "if output.reasoning is not None:",
    ),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/chat.py",
    TOOLS,
    (
        "log-probabilities come again with each event of a delta",
        "self._written(delta.logprobs) if is_first else None",
        "self._written(delta.logprobs)",
    ),
    (
        "a call that the request named ends like one that the model chose",
        "self._include_reasoning, self._asked.use)",
        "self._include_reasoning)",
    ),
    (
        "each event of a delta ends the answer",
        "reader.finish_reason(delta.finish_reason) if is_last else None",
        "reader.finish_reason(delta.finish_reason)",
    ),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/chat.py",
    ("tests/frontend/test_chat.py",),
    (
        "steps come without the parts of a stream",
        '{"steps": delta.steps} if is_first and delta.steps is not None else {}',
        "{}",
    ),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/parsing/harmony.py",
    ("tests/frontend/test_harmony.py",),
    ("reasoning of harmony is content", 'channel[1] == "analysis"', 'channel[1] == "thinking"'),
    ("a mark of harmony that comes in two parts is text", "len(text) - held_back(", "len(text) - 0 * held_back("),
    (
        "a harmony call without its end mark is lost",
        "        if self._head is None:\n            self._close(events)\n        elif self._forced:",
        "        if self._forced:",
    ),
    (
        "reasoning of a history is not shown to gpt-oss",
        'return {**message, "thinking": thinking}',
        "return message",
    ),
)
PARSING_MUTANTS += mutants_of(
    f"{FRONTEND}/conversation.py",
    ("tests/frontend/test_harmony.py",),
    (
        "a forced call of gpt-oss waits for its final message",
        "in_grammar = use.forced and output.is_harmony",
        "in_grammar = False",
    ),
)
