"""Defects of the parsing of reasoning and tool calls: clients would get other text than the model wrote."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

PARSING_MUTANTS = mutants_of(
    "frontend/dflash_openai/parsing/parser.py",
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
        "        text = self._space + text\n",
        "",
    ),
    (
        "reasoning that its prompt has ended is looked for",
        "if reasoning is not None and reasoning.is_closed_after(prompt):",
        "if reasoning is not None and prompt == reasoning.close:",
    ),
)
