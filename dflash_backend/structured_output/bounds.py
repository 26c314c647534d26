"""Bounds on a grammar: on its regular expressions before llguidance sees them, and on what llguidance may take.

llguidance counts what it does ("fuel") and gives up at a limit, but looks at the count only between two transitions of
its lexer. One transition over an expression of n optional parts takes a time and a memory that grow with n * n. With
few enough of them every mask is bounded by construction: by the fuel, and by one transition. `checks.grammar_bounds`
measures what the bounds let through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.lark import LarkParts, read_lark

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
_QUOTED = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:|[^\]\\])*\]", re.DOTALL)
_PART = re.compile(r"[?*+{]|(?<=[(|:])(?=[|)])|(?<=\|)\Z|\A(?=\|)")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]+(?=\)))?")
_EXPRESSION = re.compile(r'"(?:pattern|format)"')
_INTERSECTION = re.compile(r'"(?:patternProperties|allOf|multipleOf)"')
_HEAVY_LARK = re.compile(r"[&~]|%(?:regex|llguidance|lark)")


class BoundError(ValueError):
    """A grammar is beyond its bounds. The message is for the client and completes a sentence."""


def limits() -> LLParserLimits:
    """What a grammar may take of llguidance, as it is compiled and for each mask."""
    return LLParserLimits(verbose_errors=False, step_lexer_fuel=MASK_FUEL, max_lexer_states=MAX_STATES)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that has its first mask, or an error. grammar: in llguidance's own form."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def num_parts(expression: str) -> int:
    """How many parts of a regular expression are optional or repeated, an empty alternative included."""
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
        found = {json.dumps(schema): parts for schema, parts in _with_expression(_read(grammar.text))}
        return [str(LLMatcher.grammar_from_json_schema(schema)) for schema in _largest(found)]
    if grammar.kind != "grammar":
        return []
    lark = read_lark(grammar.text)
    text = grammar.text
    for at in reversed(lark.starts):
        text = f"{text[:at]}begin-of-all{text[at + len('start') :]}"
    found = {f"start: {name}\n{text}": parts for name, parts in _parts_of_terminals(lark).items()}
    found |= {f"start: /{expression}/\n": num_parts(expression) for expression in lark.expressions}
    schemas = {
        json.dumps(schema): parts
        for keyword, value in lark.values
        if keyword == "%json"
        for schema, parts in _with_expression(value)
    }
    grammars = [str(LLMatcher.grammar_from_lark(one)) for one in _largest(found)]
    return grammars + [str(LLMatcher.grammar_from_json_schema(schema)) for schema in _largest(schemas)]


def _largest(found: dict[str, int]) -> list[str]:
    return sorted(found, key=lambda text: -found[text])[:MAX_TRIED_EXPRESSIONS]


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
    for first in lark.terminals:
        todo = [first]
        while todo:
            terminal = lark.terminals[todo[-1]]
            missing = [name for name in terminal.names if name in lark.terminals and name not in known]
            if missing and todo[-1] not in known:
                known[todo[-1]] = 0
                todo += missing
                continue
            name = todo.pop()
            own = terminal.num_parts + sum(map(num_parts, terminal.expressions))
            known[name] = min(MOST_PARTS, own + sum(known.get(other, 0) for other in terminal.names))
    return known


def _in_schema(schema: Any) -> Iterator[tuple[str, str, int]]:
    for key, value in _items(schema):
        if key == "pattern" and isinstance(value, str):
            yield "a 'pattern'", value, num_parts(value)
        elif key == "patternProperties" and isinstance(value, dict):
            for name in value:
                yield "a name of 'patternProperties'", name, num_parts(name)
        elif key == "whitespace_pattern" and isinstance(value, str):
            yield "a 'whitespace_pattern'", value, num_parts(value)


def _with_expression(root: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """A schema for each expression of `root`, in which nothing comes before it, and its number of parts."""
    defs = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
    todo = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(value.get("pattern"), str):
                own = {key: value[key] for key in ("pattern", "format", "minLength", "maxLength") if key in value}
                yield {"type": "string", **own}, num_parts(value["pattern"])
            if isinstance(value.get("patternProperties"), dict):
                yield from (
                    ({"type": "string", "pattern": name}, num_parts(name)) for name in value["patternProperties"]
                )
            if isinstance(value.get("allOf"), list):
                yield {**defs, **value}, sum(parts for _, _, parts in _in_schema(value["allOf"]))
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key within a value of JSON, and what it has."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield from one.items()
            todo += one.values()
        elif isinstance(one, list):
            todo += one


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
