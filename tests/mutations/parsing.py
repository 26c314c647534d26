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
        "if calls is None:\n            self._add_text(",
        "if calls is None:\n            (lambda *text: None)(",
    ),
    (
        "a tool call that the answer's end breaks off gets a close mark",
        "complete = not (at_end and self._tools.close)",
        "complete = True",
    ),
    (
        "reasoning is looked for behind content",
        'opening = rf"\\A\\s*{re.escape(reasoning.open)}"',
        'opening = rf"\\s*{re.escape(reasoning.open)}"',
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
    ("values of numbers are texts", 'self._is_text = declared == "string"', "self._is_text = True"),
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
