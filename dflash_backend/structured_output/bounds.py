"""Bounds on a grammar: on its regular expressions before llguidance sees them, and on what llguidance may take.

llguidance counts what it does ("fuel") and gives up at a limit, but looks at the count only between two transitions of
its lexer. One transition over an expression of n optional parts takes a time and a memory that grow with n * n. With
few enough of them every mask is bounded by construction: by the fuel, and by one transition. `checks.grammar_bounds`
measures what the bounds let through.
"""

from __future__ import annotations

import heapq
import json
import operator
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.lark import LarkParts, read_lark, with_replaced

# Of one regular expression.
MAX_EXPRESSION_CHARS = 4096
MAX_EXPRESSION_PARTS = 500
# The squares of the parts of all expressions together: one state of the lexer may stand in all of them.
MAX_SQUARED_PARTS = 4 * MAX_EXPRESSION_PARTS**2
# Those that are tried by themselves, the ones of most parts first.
MAX_TRIED_EXPRESSIONS = 64
# A grammar is heavy that has more characters than this, in all its expressions or in all.
MAX_LIGHT_EXPRESSION_CHARS = 500
MAX_LIGHT_CHARS = 16_384
# A fourth and two fifths of llguidance's defaults. The grammars of `checks.structured` need at most 10,000 and 300; a
# text with a `maxLength` needs a few states for each of its characters.
MASK_FUEL = 50_000
MAX_STATES = 100_000

# Terminals of terminals of terminals may have more parts than there are numbers for.
MOST_PARTS = 10**9
# A class that does not end goes to the end of the text, so that no character is looked at twice.
_QUOTED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
_PART = re.compile(r"[?*+{]|(?<=[(|:])(?=[|)])|(?<=\|)\Z|\A(?=\|)")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]+(?=\)))?")
_EXPRESSION = re.compile(r'"(?:pattern|format)"')
_INTERSECTION = re.compile(r'"(?:patternProperties|allOf|multipleOf)"')
_HEAVY_LARK = re.compile(r"[&~]|%(?:regex|llguidance|lark)")


class BoundError(ValueError):
    """A grammar is beyond its bounds. The message is for the client and completes a sentence."""


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that has its first mask, or an error. grammar: in llguidance's own form."""
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=MASK_FUEL, max_lexer_states=MAX_STATES)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def num_parts(expression: str) -> int:
    """How many parts of a regular expression are optional or repeated, an empty alternative included."""
    if _VERBOSE.search(expression):  # comments hide what a class is
        return sum(map(expression.count, "?*+{|"))
    return len(_PART.findall(_GROUP.sub("(", _QUOTED.sub("x", expression))))


def check_bounds(grammar: StructuredOutputs) -> None:
    """Raise `BoundError` where a grammar has an expression that is too large, or too many."""
    sizes = []
    for name, expression, parts in _expressions(grammar):
        if len(expression) > MAX_EXPRESSION_CHARS:
            raise BoundError(
                f"has a regular expression of {len(expression)} characters in {name}; allowed: {MAX_EXPRESSION_CHARS}"
            )
        if parts > MAX_EXPRESSION_PARTS:
            raise BoundError(
                f"has a regular expression with {parts} optional or repeated parts in {name}; allowed: "
                f"{MAX_EXPRESSION_PARTS}"
            )
        sizes.append(parts)
    if sum(parts**2 for parts in sizes) > MAX_SQUARED_PARTS:
        raise BoundError(
            f"has {sum(sizes)} optional or repeated parts in its {len(sizes)} regular expressions; allowed: "
            f"{MAX_SQUARED_PARTS} as the sum of their squares"
        )


def is_heavy(grammar: StructuredOutputs) -> bool:
    """Whether a grammar may take longer than its size says: it is large, has long expressions, or intersections."""
    if len(grammar.text) > MAX_LIGHT_CHARS or grammar.kind == "choice":
        return len(grammar.text) > MAX_LIGHT_CHARS
    if grammar.kind == "grammar" and _HEAVY_LARK.search(grammar.text):
        return True
    if grammar.kind != "regex" and _INTERSECTION.search(grammar.text):
        return True
    return sum(len(expression) for _, expression, _ in _expressions(grammar)) > MAX_LIGHT_EXPRESSION_CHARS


def needs_trial(grammar: StructuredOutputs) -> bool:
    """Whether a grammar is tried in a process of its own before it is compiled."""
    if grammar.kind == "grammar" or is_heavy(grammar):
        return True
    return grammar.kind == "json" and _EXPRESSION.search(grammar.text) is not None


def expression_grammars(grammar: StructuredOutputs) -> list[str]:
    """A grammar in llguidance's own form for each expression that `grammar` has, by itself, so that an answer begins in
    it."""
    if grammar.kind == "json":
        return _schemas([_read(grammar.text)])
    if grammar.kind != "grammar":
        return []
    lark = read_lark(grammar.text)
    parts = _parts_of_terminals(lark)
    parts |= {f"/{expression}/": num_parts(expression) for expression in lark.expressions}
    largest = heapq.nlargest(MAX_TRIED_EXPRESSIONS, parts, key=parts.__getitem__)
    # Only now, since each that is a terminal is as long as the whole. Its own rule `start` gets another name.
    rest = with_replaced(grammar.text, [(at, "start", "begin-of-all") for at in lark.starts])
    texts = [f"start: {one}\n" if one.startswith("/") else f"start: {one}\n{rest}" for one in largest]
    values = [value for keyword, value in lark.values if keyword == "%json"]
    return [str(LLMatcher.grammar_from_lark(text)) for text in texts] + _schemas(values)


def _schemas(roots: list[Any]) -> list[str]:
    """A grammar for each of the largest expressions of these schemas."""
    found = (one for root in roots for one in _with_expression(root))
    largest = heapq.nlargest(MAX_TRIED_EXPRESSIONS, found, key=operator.itemgetter(2))
    try:
        texts = dict.fromkeys(json.dumps(defs | schema) for defs, schema, _ in largest)
    except RecursionError:  # llguidance takes a tenth of that depth
        return []
    return [str(LLMatcher.grammar_from_json_schema(text)) for text in texts]


def _expressions(grammar: StructuredOutputs) -> Iterator[tuple[str, str, int]]:
    """Where each expression of a grammar is, its text, and its number of parts; a terminal of Lark has the parts of all
    that it consists of, and no text."""
    if grammar.kind == "regex":
        yield "'regex'", grammar.text, num_parts(grammar.text)
    elif grammar.kind == "json":
        yield from _in_schema(_read(grammar.text))
    elif grammar.kind == "grammar":
        lark = read_lark(grammar.text)
        for expression in lark.expressions:
            yield "an expression between slashes", expression, num_parts(expression)
        for name, parts in _parts_of_terminals(lark).items():
            yield f"the terminal {name[:100]}", "", parts
        for keyword, value in lark.values:
            if keyword == "%json":
                yield from _in_schema(value)


def _parts_of_terminals(lark: LarkParts) -> dict[str, int]:
    """Parts of each terminal, those of the terminals that it consists of included. One that consists of itself is
    wrong, which llguidance says."""
    known: dict[str, int] = {}
    open_ones: set[str] = set()
    for first in lark.terminals:
        todo = [first]
        while todo:
            name = todo.pop()
            if name in known:
                continue
            names = [other for other in lark.terminals[name].names if other in lark.terminals]
            missing = [other for other in dict.fromkeys(names) if other not in known and other not in open_ones]
            if missing and name not in open_ones:
                open_ones.add(name)
                todo += [name, *missing]
                continue
            own = lark.terminals[name].num_parts + sum(map(num_parts, lark.terminals[name].expressions))
            known[name] = min(MOST_PARTS, own + sum(known.get(other, 0) for other in names))
    return known


def _in_schema(schema: Any) -> Iterator[tuple[str, str, int]]:
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from ((name, text, num_parts(text)) for name, text in _own_expressions(value))
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _with_expression(root: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
    """For each expression of `root` what it may refer to, a schema in which nothing comes before it, and its number of
    parts. The schema of an `allOf` has all expressions within."""
    defs = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
    seen: set[tuple[str, ...]] = set()
    for value, parts in _subtrees(root):
        if isinstance(value.get("pattern"), str):
            own: dict[str, Any] = {
                key: value[key] for key in ("pattern", "format", "minLength", "maxLength") if key in value
            }
            if (key := tuple(map(repr, own.items()))) not in seen:
                seen.add(key)
                yield {}, {"type": "string", **own}, num_parts(value["pattern"])
        if isinstance(value.get("patternProperties"), dict):
            yield from (
                ({}, {"type": "string", "pattern": name}, num_parts(name)) for name in value["patternProperties"]
            )
        if isinstance(value.get("allOf"), list):
            yield defs, value, parts


def _subtrees(root: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object within a value of JSON, with the number of parts of all expressions in it; what is within an object
    comes before it, so each is looked at once."""
    parts: dict[int, int] = {}
    todo = [(root, False)]
    while todo:
        value, is_done = todo.pop()
        if not isinstance(value, dict | list):
            continue
        within = list(value.values()) if isinstance(value, dict) else value
        if not is_done:
            todo.append((value, True))
            todo += [(one, False) for one in within]
            continue
        parts[id(value)] = sum(parts.get(id(one), 0) for one in within)
        if isinstance(value, dict):
            parts[id(value)] += sum(num_parts(text) for _, text in _own_expressions(value))
            yield value, parts[id(value)]


def _own_expressions(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What each expression of an object is, without those within, and its text."""
    for key in ("pattern", "whitespace_pattern"):
        if isinstance(schema.get(key), str):
            yield f"a '{key}'", schema[key]
    if isinstance(schema.get("patternProperties"), dict):
        yield from (("a name of 'patternProperties'", name) for name in schema["patternProperties"])


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
