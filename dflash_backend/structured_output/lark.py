"""Takes apart a grammar in Lark's notation, as far as its bounds need: terminals, expressions, JSON schemas and names
of special tokens. Whether it is a grammar at all llguidance says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Each character is looked at once: what does not end, or is no name, is taken whole and tried no further.
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*+"i?)
      | (?P<regex>/(?:\\.|[^/\\])++/[imslux]*)
      | (?P<endless>"(?:\\.|[^"\\\n])*+|/(?:\\.|[^/\\])*+)
      | (?P<special><[^<>\s]+>)
      | (?P<json>%(?:json|regex|llguidance)\b\s*)
      | (?P<name>_*+[A-Za-z][\w-]*)
      | (?P<nameless>_++)
      | (?P<operator>[?*+~{|()\[:])
      | (?P<end>\n(?=[ \t]*[!?_]*[A-Za-z%]))""",
    re.VERBOSE,
)
_TERMINAL = re.compile(r"_?[A-Z][A-Z0-9_-]*")


@dataclass
class Terminal:
    """A terminal's own definition. num_parts: its operators that make a part optional or repeat it. expressions: its
    regular expressions. names: the terminals that it consists of, each as often as it occurs."""

    num_parts: int = 0
    expressions: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass
class LarkParts:
    """What a grammar consists of. terminals: by name; those of rules' own strings and expressions are without a name,
    and so only in `expressions`. values: those of `%json`, `%regex` and `%llguidance`. special: names of special tokens
    and sets of ids, each with the place where it is written. strings: those of rules, with their places and quotes.
    starts: where the name of the rule `start` is written."""

    terminals: dict[str, Terminal] = field(default_factory=dict)
    expressions: list[str] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)
    special: list[tuple[int, str]] = field(default_factory=list)
    strings: list[tuple[int, str]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def read_lark(text: str) -> LarkParts:
    """The parts of a grammar. What is no Lark is passed over."""
    parts = LarkParts()
    current: Terminal | None = None
    tokens = list(_tokens(text))
    for number, (kind, at, value) in enumerate(tokens):
        if kind == "name":
            if number + 1 < len(tokens) and tokens[number + 1][2] in (":", "[", "{") and _begins(tokens, number):
                current = parts.terminals.setdefault(value, Terminal()) if _TERMINAL.fullmatch(value) else None
            elif current is not None and _TERMINAL.fullmatch(value):
                current.names.append(value)
            if value == "start":
                parts.starts.append(at)
        elif kind == "regex":
            expression, _, flags = value[1:].rpartition("/")
            if "x" in flags:
                expression = f"(?x){expression}"
            parts.expressions.append(expression)
            if current is not None:
                current.expressions.append(expression)
        elif kind == "operator" and value in "?*+~{" and current is not None and not _begins(tokens, number):
            current.num_parts += 1
        elif kind == "string" and current is None:
            parts.strings.append((at, value))
        elif kind == "special":
            parts.special.append((at, value))
        elif kind == "value":
            parts.values.append(value)
    return parts


def with_replaced(text: str, parts: Iterable[tuple[int, str, str]]) -> str:
    """A text with others in it: where each goes, what is there, and what it is."""
    pieces, end = [], 0
    for at, old, new in sorted(parts):
        pieces += [text[end:at], new]
        end = at + len(old)
    return "".join((*pieces, text[end:]))


def _begins(tokens: list[tuple[str, int, Any]], number: int) -> bool:
    """Whether a token is the first of its line, the mark of a rule aside."""
    if number and tokens[number - 1][2] == "?":
        number -= 1
    return number == 0 or tokens[number - 1][0] == "end"


def _tokens(text: str) -> Iterator[tuple[str, int, Any]]:
    """Kind, place and text of each; of a `value` the keyword and what is behind it. A value that is no JSON is wrong,
    which llguidance says: those behind it are not read."""
    at, decoder, all_read = 0, json.JSONDecoder(), True
    while (found := _TOKEN.search(text, at)) is not None:
        kind, at = str(found.lastgroup), found.end()
        if kind == "comment":
            continue
        if kind != "json":
            yield kind, found.start(), found.group()
            continue
        try:
            if not all_read:
                continue
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            all_read = False
            continue
        yield "value", found.start(), (found.group().strip(), value)
