"""JSON schemas as clients write them, and what is made of them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dflash_backend.text.json_schema import (
    MAX_ALTERNATIVES,
    MAX_CHARS,
    MAX_PLACE_CHARS,
    SchemaError,
    _num_chars,
    normalise,
)
from dflash_backend.text.structured_outputs import FormatError, read_response_format, read_structured_outputs

INTEGER = {"type": "integer"}
AB = {"a": INTEGER, "b": INTEGER}
NULLABLE = [
    "$defs",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "dependentRequired",
    "description",
    "enum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "title",
    "type",
    "uniqueItems",
    "unevaluatedProperties",
]
# A place of a schema in another one: how it is put there.
PLACES = {
    "root": lambda schema: schema,
    "property": lambda schema: {"type": "object", "properties": {"required": schema, "enum": INTEGER}},
    "$defs": lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}},
    "definitions": lambda schema: {"$ref": "#/definitions/x", "definitions": {"x": schema}},
    "anyOf": lambda schema: {"anyOf": [INTEGER, schema]},
    "allOf": lambda schema: {"allOf": [schema]},
    "oneOf": lambda schema: {"oneOf": [{"type": "null"}, schema]},
    "items": lambda schema: {"type": "array", "items": schema},
    "items of draft 4": lambda schema: {"type": "array", "items": [INTEGER, schema]},
    "prefixItems": lambda schema: {"type": "array", "prefixItems": [schema], "items": False},
    "additionalProperties": lambda schema: {"type": "object", "additionalProperties": schema},
    "additionalItems": lambda schema: {"type": "array", "items": [INTEGER], "additionalItems": schema},
    "patternProperties": lambda schema: {"type": "object", "patternProperties": {"^x": schema}},
    "two deep": lambda schema: {"items": {"properties": {"properties": {"anyOf": [schema, INTEGER]}}}},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_keyword_that_is_null_is_left_out_wherever_a_schema_is(place: str) -> None:
    put = PLACES[place]
    kept = {"const": None, "default": None}
    assert normalise(put({**dict.fromkeys(NULLABLE), **kept})) == put(kept)
    assert normalise(put({"type": "string", "minLength": 1.0})) == put({"type": "string", "minLength": 1})


def test_null_as_a_value_stays() -> None:
    schema = {"enum": [None, 1], "const": None, "default": None, "examples": [None]}
    assert normalise(schema) == schema


def test_names_of_properties_are_no_keywords() -> None:
    names = {name: {"type": "null"} for name in ("required", "not", "uniqueItems", "if", "x-guidance", "enum", "$defs")}
    assert normalise({"properties": names}) == {"properties": names}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        *(
            ({keyword: 2.0}, {keyword: 2})
            for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
        ),
        ({"minimum": 1.5, "maxLength": 1.5, "const": 1.0}, {"minimum": 1.5, "maxLength": 1.5, "const": 1.0}),
        ({"uniqueItems": False}, {}),
        ({"uniqueItems": True, "maxItems": 1.0}, {"maxItems": 1}),
        ({"propertyNames": {"type": "string", "description": "x"}}, {}),
        ({"propertyNames": True}, {}),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
            {"properties": AB, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"type": "string", "pattern": "^x"}},
            {"patternProperties": {"^x": True}, "additionalProperties": False},
        ),
        ({"not": False, "type": "null"}, {"type": "null"}),
        ({"type": "string", "not": {}}, False),
        ({"properties": {"a": {"not": {}}, "b": INTEGER}}, {"properties": {"a": False, "b": INTEGER}}),
        ({"format": "password", "type": "string"}, {"type": "string"}),
        ({"format": "uri-reference"}, {}),
        ({"format": "date"}, {"format": "date"}),
        ({"if": INTEGER}, {}),
        ({"then": INTEGER, "else": INTEGER}, {}),
        ({"minContains": 1}, {}),
        ({"dependentRequired": {}, "dependencies": {}, "unevaluatedProperties": {}}, {}),
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        ({"x-guidance": {"lenient": True}, "type": "null"}, {"type": "null"}),
        (True, True),
        # The number of properties, some of which may be left out.
        ({"properties": AB, "minProperties": 1, "required": ["b"]}, {"properties": AB, "required": ["b"]}),
        (
            {"properties": AB, "minProperties": 1},
            {
                "anyOf": [
                    {"properties": AB, "required": ["a"]},
                    {"properties": {"a": False, "b": INTEGER}, "required": ["b"]},
                ]
            },
        ),
        (
            {"properties": AB, "maxProperties": 1, "minProperties": 1, "$defs": {"x": True}},
            {
                "$defs": {"x": True},
                "anyOf": [
                    {
                        "properties": {"a": INTEGER, "b": False},
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                    {
                        "properties": {"a": False, "b": INTEGER},
                        "required": ["b"],
                        "additionalProperties": False,
                    },
                ],
            },
        ),
        ({"properties": AB, "maxProperties": 2.0}, {"properties": AB, "additionalProperties": False}),
        ({"properties": AB, "maxProperties": 0, "required": ["a"]}, False),
        ({"properties": AB, "required": ["a", "b"], "maxProperties": 3}, None),
        ({"type": "object", "minProperties": 3}, None),
    ],
)
def test_a_schema_allows_the_same_in_other_words(schema: Any, expected: Any) -> None:
    assert normalise(schema) == (schema if expected is None else expected)


@pytest.mark.parametrize(
    ("schema", "wider", "left_out"),
    [
        ({"items": {"uniqueItems": True}}, {"items": {}}, ["'uniqueItems' at items"]),
        ({"type": "string", "not": {"enum": ["a"]}}, {"type": "string"}, ["'not'"]),
        ({"anyOf": [{"if": INTEGER, "then": {}, "else": {}}]}, {"anyOf": [{}]}, ["'if' at anyOf[0]"]),
        ({"contains": INTEGER, "minContains": 2, "maxContains": 3, "minItems": 2}, {"minItems": 2}, ["'contains'"]),
        ({"oneOf": [INTEGER, {"type": "number"}]}, {"anyOf": [INTEGER, {"type": "number"}]}, []),
        ({"oneOf": [INTEGER], "anyOf": [{"minimum": 3}]}, {"anyOf": [{"minimum": 3}]}, ["'oneOf'"]),
        ({"pattern": "(?=a)b"}, {}, ["'pattern'"]),
        ({"pattern": r"(?<!a)b"}, {}, ["'pattern'"]),
        ({"pattern": r"(a)\1"}, {}, ["'pattern'"]),
        ({"pattern": r"(?P<n>a)(?P=n)"}, {}, ["'pattern'"]),
        ({"pattern": r"\bfoo"}, {}, ["'pattern'"]),
        ({"pattern": r"\(?=\\1(?:a)(?P<n>b)"}, None, []),
        (
            {
                "patternProperties": {"^(?!b)": INTEGER, "^c": INTEGER},
                "additionalProperties": False,
                "minProperties": 1,
            },
            {"patternProperties": {"^c": INTEGER}, "minProperties": 1},
            ["'patternProperties'"],
        ),
        (
            {"properties": {"a": {"properties": {f"p{i}": INTEGER for i in range(20)}, "minProperties": 3}}},
            {"properties": {"a": {"properties": {f"p{i}": INTEGER for i in range(20)}}}},
            ["the number of properties at properties.a"],
        ),
    ],
)
def test_a_schema_that_need_not_be_held_as_a_whole_is_held_where_it_can_be(
    schema: Any, wider: Any, left_out: list[str]
) -> None:
    told: list[str] = []
    assert normalise(schema, left_out=told) == (schema if wider is None else wider)
    assert told == left_out


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "the keyword 'uniqueItems' at properties.a.items,"),
        ({"not": INTEGER}, "the keyword 'not', which"),
        ({"anyOf": [INTEGER, {"if": INTEGER, "then": {}}]}, "the keyword 'if' at anyOf[1],"),
        ({"contains": INTEGER}, "'contains'"),
        ({"dependencies": {"a": ["b"]}}, "'dependencies'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"unevaluatedItems": False}, "'unevaluatedItems'"),
        ({"propertyNames": {"maxLength": 3}}, "'propertyNames'"),
        ({"propertyNames": {"type": "integer"}}, "'propertyNames'"),
        ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
        (
            {"properties": {f"p{i}": INTEGER for i in range(20)}, "minProperties": 3},
            f"the number of 20 optional properties, in more than {MAX_ALTERNATIVES} ways",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as error:
        normalise(schema)
    assert words in str(error.value)
    assert len(str(error.value)) < 300


def test_schemas_of_all_parameters_are_brought_to_that_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1.0}}, "required": None}
    text = '{"type":"object","properties":{"a":{"type":"string","minLength":1}}}'
    for grammar in (
        read_structured_outputs({"json": schema}),
        read_structured_outputs({"json": '{"type":"object","properties":{"a":{"type":"string","minLength":1.0}}}'}),
        read_response_format({"type": "json_schema", "json_schema": {"schema": schema}}),
    ):
        assert grammar is not None
        assert grammar.text == text
    with pytest.raises(FormatError, match="has a JSON schema that has the keyword 'not', which"):
        read_structured_outputs({"json": {"not": INTEGER}})


class Counted(str):
    """A name that counts how often it is compared with another."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.times += 1
        return str.__eq__(self, other)


@pytest.mark.parametrize("beside", [{}, {"minProperties": 150}])
def test_names_of_properties_are_compared_with_few_others(beside: dict[str, Any]) -> None:
    names = [Counted(f"{number:03}") for number in range(300)]
    required = names if not beside else []
    Counted.times = 0
    try:
        normalise({"properties": dict.fromkeys(names, INTEGER), "required": required, **beside})
    except SchemaError:
        assert beside
    assert Counted.times < 20_000


@pytest.mark.parametrize(
    "outer",
    [
        lambda inner: {"properties": {"a": {}, "b": inner}, "minProperties": 1},
        lambda inner: {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": inner},
    ],
)
@pytest.mark.parametrize("depth", [17, 30])
def test_a_schema_that_would_grow_with_each_level_is_refused(outer: Any, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = outer(schema)
    with pytest.raises(FormatError):
        read_structured_outputs({"json": schema})
    with pytest.raises(SchemaError):
        normalise(schema)
    assert isinstance(normalise(schema, left_out=[]), dict)


def test_of_a_place_with_a_long_name_the_beginning_is_told() -> None:
    within = {f"{number}": {"not": INTEGER} for number in range(100)}
    left_out: list[str] = []
    normalise({"properties": {"a" * 10_000: {"properties": within}}}, left_out=left_out)
    assert len(left_out) == 100
    assert left_out[0].startswith("'not' at properties.aaa")
    assert max(map(len, left_out)) < 2 * MAX_PLACE_CHARS


@pytest.mark.parametrize("text", ["", "x" * 50_000])
def test_a_schema_that_is_too_long_once_it_is_written_out_is_refused(text: str) -> None:
    """However short it is: what is there once stands in many alternatives, of objects beside one another too."""
    bounded: dict[str, Any] = {"description": text}
    for _ in range(1 if text else 5):
        bounded = {"minProperties": 1, "properties": {"a": {}, "b": {}, "z": bounded}}
    began = time.monotonic()
    with pytest.raises(SchemaError, match=f"has more than {MAX_CHARS} characters, with objects"):
        normalise({"properties": {f"p{i}": bounded for i in range(100)}})
    assert time.monotonic() - began < 5


def test_the_length_of_a_schema_is_no_more_than_that_of_its_text() -> None:
    for schema in (
        {"a": [1, True, None, "x"], "b": {}},
        {"properties": {"é": {"const": "a"}, "c": {"enum": [[], 1.5]}}},
    ):
        assert 0 < _num_chars(schema, {}) <= len(json.dumps(schema, separators=(",", ":"), ensure_ascii=False))
