"""JSON schemas as clients write them, brought to what llguidance holds: the same answers, in other words.

Clients write null for a keyword that they leave out, 1.0 for 1, and keywords that ask for nothing. What cannot be held
is refused by name: nothing is taken and then not followed, unless the caller wants that and tells it. Only places of
schemas are looked at: a property that is called `required` is no keyword.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = dict[str, Any] | bool

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = frozenset(
    [
        "additionalProperties",
        "additionalItems",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LISTS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_NAMED = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
_INTEGERS = frozenset(
    ["maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"]
)
# Values for which null is one like any other.
_ANY_VALUE = frozenset(("const", "default"))
_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_ANNOTATIONS = frozenset(
    ["$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"]
)
# What asks for something that is not held, however it is written.
_NOT_HELD = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
]
# What means nothing without one of them.
_BESIDE = {"if": ("then", "else"), "contains": ("minContains", "maxContains")}
# What an automaton cannot do: to look around, and to find again what was found.
_NO_AUTOMATON = re.compile(r"\\[1-9bB]|\\k<|\(\?(?:P=|<?[=!])|\\.()", re.DOTALL)
# Objects that bound the number of their properties become this many alternatives at most.
MAX_ALTERNATIVES = 64
# A schema that is given once may stand in several alternatives. Written out it has this many characters at most, as any
# format of a request (`text/structured_outputs.py:MAX_GRAMMAR_CHARS`).
MAX_CHARS = 262_144
# Of a place in a schema, what is told: names of properties may be long, and each keyword has a place.
MAX_PLACE_CHARS = 500

# What is known of the lengths of lists and objects, by their ids; they are kept, so that no other one gets the id.
_Sizes = dict[int, tuple[Any, int]]


class SchemaError(ValueError):
    """A schema cannot be held. The message is for the client and completes a sentence."""


def normalise(schema: Any, where: str = "", left_out: list[str] | None = None) -> Any:
    """A schema that allows the same values and has no keyword that llguidance cannot hold; at most it allows fewer
    objects where it bounds the number of their properties. where: the place of the schema, for errors. What is no
    schema is returned as it is. Raises `SchemaError`; where there is a list `left_out`, what cannot be held goes there,
    as a keyword and its place, and the schema allows more values."""
    sizes: _Sizes = {}
    found = _normalised(schema, where, left_out, sizes)
    if _num_chars(found, sizes) > MAX_CHARS:
        raise SchemaError(
            f"has more than {MAX_CHARS} characters, with objects that bound the number of their properties written "
            "out; allowed: a shorter one, fewer such bounds, or required properties"
        )
    return found


def _normalised(schema: Any, where: str, left_out: list[str] | None, sizes: _Sizes) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if (value is None and keyword not in _ANY_VALUE) or keyword == "x-guidance":
            continue
        place = _place(where, f".{keyword}" if where else keyword)
        found[keyword] = _value(keyword, value, place, left_out, sizes)
    if found.get("not") in (True, {}):
        return False
    _drop_what_asks_for_nothing(found)
    _name_properties(found, sizes)
    at = f" at {where}" if where else ""
    if left_out is not None:
        left_out += [f"'{keyword}'{at}" for keyword in _widen(found)]
    for keyword in _NOT_HELD:
        if keyword in found:
            raise SchemaError(f"has the keyword '{keyword}'{at}, which this server cannot hold; leave it out")
    try:
        return _bound_properties(found, at, sizes)
    except SchemaError:
        if left_out is None:
            raise
        left_out.append(f"the number of properties{at}")
        return {key: value for key, value in found.items() if key not in ("minProperties", "maxProperties")}


def _place(where: str, part: str) -> str:
    """The place of a part of what is at `where`, and of a long one its beginning."""
    if len(where) > MAX_PLACE_CHARS:
        return where
    place = where + part
    return place if len(place) <= MAX_PLACE_CHARS else f"{place[:MAX_PLACE_CHARS]}..."


def _num_chars(value: Any, sizes: _Sizes) -> int:
    """How many characters a value of JSON has at least; what is in several places counts in each."""
    if not isinstance(value, dict | list | tuple):
        return len(value) + 2 if isinstance(value, str) else 1
    if id(value) not in sizes:
        length = 1
        if isinstance(value, dict):
            length += sum(3 + len(name) for name in value if isinstance(name, str))
            value_items: Iterable[Any] = value.values()
        else:
            value_items = value
        sizes[id(value)] = value, length + sum(1 + _num_chars(item, sizes) for item in value_items)
    return sizes[id(value)][1]


def _widen(schema: dict[str, Any]) -> Iterator[str]:
    """Remove what cannot be held, so that the schema allows more values; yields its keywords."""
    for keyword in _NOT_HELD:
        if keyword in schema:
            for name in (keyword, *_BESIDE.get(keyword, ())):
                schema.pop(name, None)
            yield keyword
    if "oneOf" in schema and "anyOf" not in schema:
        # Where alternatives overlap, a value of both is allowed too.
        schema["anyOf"] = schema.pop("oneOf")
    elif "oneOf" in schema:
        del schema["oneOf"]
        yield "oneOf"
    if _is_no_automaton(schema.get("pattern")):
        del schema["pattern"]
        yield "pattern"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and any(map(_is_no_automaton, patterns)):
        # Properties that are neither named nor matched may be those of the pattern.
        schema["patternProperties"] = {name: one for name, one in patterns.items() if not _is_no_automaton(name)}
        schema.pop("additionalProperties", None)
        yield "patternProperties"


def _is_no_automaton(pattern: Any) -> bool:
    """Whether an expression is of those that no automaton can follow."""
    found = _NO_AUTOMATON.finditer(pattern) if isinstance(pattern, str) else ()
    return any(match[1] is None for match in found)


def _value(keyword: str, value: Any, where: str, left_out: list[str] | None, sizes: _Sizes) -> Any:
    """What a keyword has, its schemas normalised."""
    if keyword in _NAMED and isinstance(value, Mapping):
        return {name: _normalised(one, _place(where, f".{name}"), left_out, sizes) for name, one in value.items()}
    if keyword in _LISTS and isinstance(value, list | tuple):
        return [_normalised(one, _place(where, f"[{i}]"), left_out, sizes) for i, one in enumerate(value)]
    if keyword in _ONE:
        return _normalised(value, where, left_out, sizes)
    if keyword in _INTEGERS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _drop_what_asks_for_nothing(schema: dict[str, Any]) -> None:
    """Remove keywords that every value follows, and bring draft 4's exclusive bounds to today's form."""
    nothing: dict[str, tuple[Any, ...]] = {
        "not": (False,),
        "uniqueItems": (False,),
        "propertyNames": (True, {}),
        "dependencies": ({},),
        "dependentRequired": ({},),
        "dependentSchemas": ({},),
        "unevaluatedItems": (True, {}),
        "unevaluatedProperties": (True, {}),
    }
    for keyword, values in nothing.items():
        # 0 is no boolean.
        if any(schema.get(keyword) == value and type(schema[keyword]) is type(value) for value in values):
            del schema[keyword]
    if schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1):
        del schema["uniqueItems"]
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)


def _name_properties(schema: dict[str, Any], sizes: _Sizes) -> None:
    """Say by `properties` and `patternProperties` what `propertyNames` says, where that is the same and not too
    long."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping):
        return
    rules = {keyword: value for keyword, value in names.items() if keyword not in _ANNOTATIONS}
    kinds = rules.pop("type", "string")
    if kinds != "string" and "string" not in (kinds if isinstance(kinds, list) else ()):
        return
    values = schema.get("additionalProperties", True)
    others = {"properties", "patternProperties"}.isdisjoint(schema)
    if not rules:
        del schema["propertyNames"]
    elif others and set(rules) == {"pattern"}:
        del schema["propertyNames"]
        schema |= {"patternProperties": {rules["pattern"]: values}, "additionalProperties": False}
    elif (
        others
        and set(rules) == {"enum"}
        and all(isinstance(name, str) for name in rules["enum"])
        and len(rules["enum"]) * _num_chars(values, sizes) <= MAX_CHARS
    ):
        del schema["propertyNames"]
        schema |= {"properties": dict.fromkeys(rules["enum"], values), "additionalProperties": False}


def _bound_properties(schema: dict[str, Any], at: str, sizes: _Sizes) -> Schema:
    """An object with a bound on the number of its properties, of which some may be left out, as alternatives that say
    which are there: llguidance counts the others alone."""
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or type(low) is not int:
        return schema
    named = {name for name in required if isinstance(name, str)}
    optional = [name for name, one in properties.items() if name not in named and one is not False]
    if not (low > 0 or high is not None) or not optional:
        return schema
    kept = {key: value for key, value in schema.items() if key not in ("minProperties", "maxProperties")}
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    missing = max(0, low - len(required))
    if high is None or (type(high) is int and high >= len(required) + len(optional)):
        if high is not None and not closed:
            kept["additionalProperties"] = False
            kept.pop("patternProperties", None)
        if not missing:
            return kept
        chosen: Iterator[Sequence[str]] = combinations(optional, missing)
        last = True
    else:
        most = min(len(optional), high - len(required)) if type(high) is int else -1
        chosen = (names for count in range(missing, most + 1) for names in combinations(optional, count))
        last, kept["additionalProperties"] = False, False
        kept.pop("patternProperties", None)
    shared: dict[str, Any] = {key: kept.pop(key) for key in ("$defs", "definitions") if key in kept}
    alternatives: list[dict[str, Any]] = []
    num_chars = 0
    for names in chosen:
        alternatives.append(_with_properties(kept, optional, names, required, last))
        num_chars += _num_chars(alternatives[-1], sizes)
        if num_chars > MAX_CHARS:
            raise SchemaError(
                f"bounds the number of {len(optional)} optional properties{at}, in ways that written out are too "
                "long; allowed: fewer properties, or required ones"
            )
        if len(alternatives) > MAX_ALTERNATIVES:
            raise SchemaError(
                f"bounds the number of {len(optional)} optional properties{at}, in more "
                f"than {MAX_ALTERNATIVES} ways; allowed: fewer properties, or required ones"
            )
    return {**shared, "anyOf": alternatives} if alternatives else False


def _with_properties(
    schema: dict[str, Any], optional: list[str], names: Sequence[str], required: list[Any], others_after: bool
) -> dict[str, Any]:
    """`schema` with the optional properties `names`, and no others; with `others_after` perhaps those after them."""
    end = optional.index(names[-1]) + 1 if others_after and names else len(optional)
    left_out = set(optional[:end]).difference(names)
    properties = {name: False if name in left_out else one for name, one in schema["properties"].items()}
    return {**schema, "properties": properties, "required": [*required, *names]}
