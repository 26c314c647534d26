"""`structured_outputs` and `response_format`: what is taken, and what is refused with which words."""

from __future__ import annotations

import json

import msgspec
import pytest

from dflash_backend.messages import SamplingParams, StructuredOutputs
from dflash_backend.text.client_json import JsonError
from dflash_backend.text.sampling_params import ParameterError, parse_sampling_params
from dflash_backend.text.structured_outputs import take_formats

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'


def parse(**values) -> SamplingParams:
    return parse_sampling_params(values, max_speculative_tokens=4)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", SCHEMA_TEXT),
        ({"json": json.dumps(SCHEMA)}, "json", SCHEMA_TEXT),
        ({"json_object": True}, "json", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "no", "yes"]}, "choice", '["yes", "no"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json": None, "regex": "a+", "disable_fallback": False, "json_object": False}, "regex", "a+"),
    ],
)
def test_each_kind_of_grammar_is_taken_as_an_object_and_as_text(value, kind, text):
    expected = StructuredOutputs(kind, text)
    assert parse(structured_outputs=value).structured_outputs == expected
    assert parse(structured_outputs=json.dumps(value)).structured_outputs == expected
    assert parse(structured_outputs=expected).structured_outputs == expected


def test_all_fields_of_vllms_class_are_taken_as_its_engine_writes_them():
    """Triton's OpenAI frontend sends a forced tool choice so: `asdict` of vLLM's `StructuredOutputsParams`."""
    given = dict.fromkeys(("regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"))
    given |= {"json": SCHEMA_TEXT, "disable_any_whitespace": False, "disable_additional_properties": False}
    for backend, was_auto in ((None, False), ("xgrammar", True)):
        value = given | {"_backend": backend, "_backend_was_auto": was_auto}
        for sent in (value, json.dumps(value)):
            assert parse(structured_outputs=sent).structured_outputs == StructuredOutputs("json", SCHEMA_TEXT)


def test_the_keys_of_a_schema_keep_their_order():
    assert parse(structured_outputs={"json": SCHEMA}).structured_outputs.text.index('"b"') < SCHEMA_TEXT.index('"a"')


def test_a_response_format_means_the_same():
    of_openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for one, same in ((of_openai, {"json": SCHEMA}), ({"type": "json_object"}, {"json_object": True})):
        found = parse(response_format=one).structured_outputs
        assert found.parameter == "response_format"
        assert (
            msgspec.structs.replace(found, parameter="structured_outputs")
            == parse(structured_outputs=same).structured_outputs
        )
    assert parse(response_format={"type": "text"}) == parse(response_format=None) == SamplingParams()
    assert parse(response_format=of_openai, structured_outputs={"json": SCHEMA}).structured_outputs is not None
    with pytest.raises(ParameterError, match="name two grammars"):
        parse(response_format=of_openai, structured_outputs={"regex": "a"})


def test_any_json_follows_the_schema_true():
    for true in (True, "true"):
        assert parse(structured_outputs={"json": true}).structured_outputs == StructuredOutputs("json", "{}")
    of_openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
    assert parse(response_format=of_openai).structured_outputs.text == "{}"


def test_the_end_of_the_reasoning_is_token_ids():
    grammar = parse(structured_outputs={"regex": "a", "after_reasoning": [5, 6]}).structured_outputs
    assert grammar == StructuredOutputs("regex", "a", (5, 6))
    for one in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}):
        plain, behind = (parse(response_format=one | more) for more in ({}, {"after_reasoning": [5, 6]}))
        assert behind.structured_outputs == msgspec.structs.replace(plain.structured_outputs, after_reasoning=(5, 6))
        with pytest.raises(ParameterError, match="'response_format' .* a list of 1 to 16 token ids"):
            parse(response_format=one | {"after_reasoning": []})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "has the value 5; allowed: an object"),
        ("{", "is not JSON"),
        ({}, "exactly one of the fields .* has none"),
        ({"json": SCHEMA, "regex": "a"}, "has json and regex"),
        ({"json": 5}, "a JSON schema that is no object: 5"),
        ({"json": "{"}, "has the field 'json', which is not JSON"),
        ({"json": False}, "has a JSON schema that no answer follows"),
        ({"json": "false"}, "has a JSON schema that no answer follows"),
        ({"json": {"not": {}}}, "has a JSON schema that no answer follows"),
        ({"regex": ""}, "text of at least one character"),
        ({"regex": 5}, "text of at least one character"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"regex": "a" * 262_145}, "has 262145 characters in its field 'regex'"),
        ({"choice": []}, "has 0 choices"),
        ({"choice": "yes"}, "allowed: a list of strings"),
        ({"choice": [1]}, "allowed: a list of strings"),
        ({"choice": ["a"] * 16_385}, "has 16385 choices"),
        ({"json_object": 1}, "allowed: true"),
        ({"guided_json": SCHEMA}, "unknown field 'guided_json'"),
        ({"regex": "a", "structural_tag": "x"}, "'structural_tag', which this server does not support"),
        ({"regex": "a", "after_reasoning": "</think>"}, "a list of 1 to 16 token ids"),
        ({"regex": "a", "after_reasoning": []}, "a list of 1 to 16 token ids"),
        ({"json": json.loads("[" * 70 + "]" * 70)}, "no object"),
        ({"json": {"enum": ["x" * 300_000]}}, "has more than 262144 characters"),
        ({"json": "[" * 70 + "]" * 70}, "nested too deeply; allowed: 64 levels"),
    ],
)
def test_what_names_no_grammar_is_refused_with_the_reason(value, reason):
    with pytest.raises(ParameterError, match=f"'structured_outputs' .*{reason}"):
        parse(structured_outputs=value)


@pytest.mark.parametrize(
    "value", [{"type": "xml"}, {}, 5, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_another_response_format_is_refused(value):
    with pytest.raises(ParameterError, match="'response_format' .*json_schema"):
        parse(response_format=value)


def test_a_grammar_takes_no_other_limits_of_tokens():
    for other in ({"allowed_token_ids": [5]}, {"bad_words": ["x"]}):
        with pytest.raises(ParameterError, match="allowed: null with 'structured_outputs'"):
            parse(structured_outputs={"regex": "a"}, **other)


def test_a_schema_may_be_longer_and_deeper_than_all_other_parameters():
    deep = json.loads('{"items":' * 60 + "{}" + "}" * 60)
    long = {"enum": [f"choice {i}" for i in range(5000)]}
    for name, value in (("structured_outputs", {"json": deep}), ("response_format", {"x": long})):
        text = json.dumps({"temperature": 0.5, name: value, "chat_template_kwargs": {name: value}})
        taken, rest = take_formats(text)
        assert taken == {name: value}
        assert json.loads(rest) == {"temperature": 0.5, name: None, "chat_template_kwargs": {name: value}}


@pytest.mark.parametrize(
    "text", ["{", '{"a": 1}', '{"structured_outputs": null}', '["structured_outputs"]', "structured_outputs"]
)
def test_a_text_without_a_grammar_is_left_as_it_is(text):
    assert take_formats(text) == ({}, text)


@pytest.mark.parametrize("spelled", ["structured_outputs", r"structured\u005foutputs"])
def test_a_grammar_is_found_however_often_its_name_and_its_value_come(spelled):
    others = ", ".join('{"structured_outputs": {"regex": "é"}}' for _ in range(20))
    form = '{"a": [%s], "%s" : %s, "response_format":%s, "b": {"regex": "é"}}'
    found, rest = take_formats(form % (others, spelled, '{"regex": "é"}', '{"type": "text"}'))
    assert found == {"structured_outputs": {"regex": "é"}, "response_format": {"type": "text"}}
    assert rest == form % (others, spelled, "null", "null")


def test_a_grammar_may_have_thousands_of_values_and_not_any_number():
    many = {"json": {"enum": [f"{i}," for i in range(16_384)]}}
    assert take_formats(json.dumps({"structured_outputs": many})) == (
        {"structured_outputs": many},
        '{"structured_outputs": null}',
    )
    for name in ("structured_outputs", "response_format"):
        with pytest.raises(JsonError, match="50001 commas outside of strings; allowed: 50000"):
            take_formats(json.dumps({name: {"json": {"enum": [1] * 50_002}}}))
