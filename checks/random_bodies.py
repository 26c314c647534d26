"""Strategies for the bodies of all endpoints, made from the fields that each takes: right ones, and such with a random
place or two in them.

A field that is listed in `VALUES` has values that mostly go together with others; any other field has values of its
type, so that one that is added to a request is tried as well.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from dflash_backend.text.sampling_params import PARAMETERS
from dflash_backend.text.truncation import COUNT, SIDE, SIDES
from dflash_backend.triton.model_config import INPUTS
from dflash_openai.openapi import BODIES

Strategy = st.SearchStrategy[Any]

GENERATE = "/v2/models/dflash/generate"
# Marks of chat templates, of calls and of reasoning among ordinary words.
TEXT: Strategy = st.lists(
    st.text(max_size=6)
    | st.sampled_from(
        [
            *("Sam fills 4 bags ", "the capital of Norway", "<think>", "</think>", "<|im_start|>", "<|endoftext|>"),
            *("<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>", "é", "\u2028", "\U0001f600", "\n"),
        ]
    ),
    max_size=4,
).map("".join)
SCALARS: Strategy = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from([-(2**63), 2**63, 2**64, 1e308, 0.5, 16.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["\ud83d", "1", "true"])
    | TEXT
)
JSON: Strategy = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "name", "content", "0", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
SCHEMA: Strategy = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        {"type": "string", "maxLength": 4},
        {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        {"type": "boolean"},
        {"anyOf": [{"type": "null"}, {"type": "number"}]},
    ]
)
_TOKEN_ID = st.integers(0, 255)
_FORMAT = st.just({"type": "text"}) | st.just({"type": "json_object"})
_JSON_SCHEMA = SCHEMA.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
_NAME = st.sampled_from(["f", "get_weather", "a.b"])
_PARAMETERS = SCHEMA | st.just({"type": "object", "properties": {"city": {"type": "string"}}})


def _objects(required: Mapping[str, Strategy], optional: Mapping[str, Strategy] | None = None) -> Strategy:
    return st.fixed_dictionaries(dict(required), optional=dict(optional or {}))


def _typed(kind: str, **fields: Strategy) -> Strategy:
    return _objects({"type": st.just(kind), **fields})


_FUNCTION = _objects({"name": _NAME}, {"parameters": _PARAMETERS, "description": TEXT, "strict": st.booleans()})
_PARTS = TEXT | st.lists(_typed("text", text=TEXT), max_size=2)
_CALL = _objects(
    {"type": st.just("function"), "function": _objects({"name": _NAME, "arguments": st.just("{}") | TEXT})},
    {"id": TEXT},
)
_MESSAGE = _objects({"role": st.sampled_from(["user", "system", "developer"]), "content": _PARTS}) | _objects(
    {"role": st.just("assistant")},
    {"content": _PARTS | st.none(), "reasoning": TEXT, "tool_calls": st.lists(_CALL, min_size=1, max_size=2)},
)
MESSAGES: Strategy = st.lists(
    _MESSAGE | _objects({"role": st.just("tool"), "content": _PARTS, "tool_call_id": TEXT}), max_size=2
).flatmap(lambda before: st.just([*before, {"role": "user", "content": "What are the capitals of Spain and Oslo?"}]))
_BLOCK = st.one_of(
    _typed("text", text=TEXT),
    _typed("thinking", thinking=TEXT, signature=TEXT),
    _typed("tool_use", id=TEXT, name=_NAME, input=st.just({}) | JSON),
    _typed("tool_result", tool_use_id=TEXT, content=_PARTS),
    _typed("document", source=_typed("text", data=TEXT)),
    _typed("server_tool_use", id=TEXT),
)
_ITEM = st.one_of(
    _objects({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    _typed("message", role=st.just("user"), content=st.lists(_typed("input_text", text=TEXT), max_size=2)),
    _typed("function_call", call_id=TEXT, name=_NAME, arguments=st.just("{}") | TEXT),
    _typed("function_call_output", call_id=TEXT, output=TEXT),
    _typed("custom_tool_call", call_id=TEXT, name=_NAME, input=TEXT),
    _typed("reasoning", summary=st.lists(_typed("summary_text", text=TEXT), max_size=1)),
    _typed("web_search_call", id=TEXT),
)
_RESPONSE_TOOL = st.one_of(
    _FUNCTION.map(lambda function: {"type": "function", **function}),
    _typed("custom", name=_NAME, description=TEXT),
    _typed("namespace", name=_NAME, tools=st.lists(_FUNCTION.map(lambda f: {"type": "function", **f}), max_size=2)),
    _typed("web_search"),
)
_STRUCTURED = st.one_of(
    _objects({"json": SCHEMA}),
    _objects({"regex": st.sampled_from(["[a-c]{1,4}", "yes|no"])}),
    _objects({"choice": st.just(["yes", "no"])}),
    _objects({"grammar": st.just('start: "a" | "b"')}),
)

# By name of a field, whatever the endpoint; `VALUES_OF` has those that an endpoint takes in another form.
VALUES: dict[str, Strategy] = {
    "model": st.just("dflash"),
    "stream_options": _objects({}, dict.fromkeys(("include_usage", "continuous_usage_stats"), st.booleans())),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(_TOKEN_ID.map(str), st.floats(-100, 100), max_size=3),
    "stop": st.sampled_from(["e", "\n", ["a", "Spain"], []]),
    "stop_token_ids": st.lists(_TOKEN_ID, max_size=3),
    "allowed_token_ids": st.lists(_TOKEN_ID, min_size=1, max_size=9),
    "bad_words": st.lists(st.sampled_from(["the", "a", "Let us"]), max_size=2),
    "min_tokens": st.integers(0, 4),
    "num_speculative_tokens": st.integers(0, 3),
    "priority": st.integers(0, 9),
    "record_traffic": st.booleans(),
    "cache_salt": st.text("abc", max_size=3),
    "n": st.integers(1, 3),
    "best_of": st.just(1),
    "seed": st.integers(0, 2**31),
    "max_tokens": st.integers(1, 12),
    "max_completion_tokens": st.integers(1, 12),
    "max_output_tokens": st.integers(1, 12),
    "prompt_logprobs": st.integers(0, 2),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 3, 40]),
    "truncation_side": st.sampled_from(SIDES),
    "prompt": TEXT.filter(bool) | st.lists(_TOKEN_ID, min_size=1, max_size=5) | st.just(["Sam", "the capital"]),
    "messages": MESSAGES,
    "response_format": _FORMAT | _JSON_SCHEMA,
    "structured_outputs": _STRUCTURED,
    "guided_json": SCHEMA,
    "guided_regex": st.just("[ab]{1,3}"),
    "guided_choice": st.just(["yes", "no"]),
    "guided_grammar": st.just('start: "a"'),
    "tools": st.lists(_typed("function", function=_FUNCTION), min_size=1, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "top_logprobs": st.integers(0, 3),
    "modalities": st.just(["text"]),
    "store": st.just(False),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": True}, {"x": 1}]),
    "system": _PARTS,
    "stop_sequences": st.just(["e", "Oslo"]),
    "thinking": st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}]),
    "output_config": _objects({}, {"format": SCHEMA.map(lambda schema: {"type": "json_schema", "schema": schema})}),
    "input": TEXT.filter(bool) | st.lists(_ITEM, min_size=1, max_size=3),
    "text": _objects({}, {"format": _FORMAT | SCHEMA.map(lambda s: {"type": "json_schema", "name": "s", "schema": s})}),
    "reasoning": _objects({}, {"effort": st.sampled_from(["none", "low"])}),
    "include": st.just(["message.output_text.logprobs"]),
    "tokens": st.lists(_TOKEN_ID, min_size=1, max_size=9),
}
VALUES_OF: dict[str, dict[str, Strategy]] = {
    "/v1/completions": {"logprobs": st.integers(0, 3), "suffix": st.just("")},
    "/v1/chat/completions": {"echo": st.just(False), "logprobs": st.booleans()},
    "/v1/responses": {"tools": st.lists(_RESPONSE_TOOL, max_size=2)},
    "/tokenize": {"prompt": TEXT.filter(bool)},
    GENERATE: {
        "logprobs": st.integers(0, 3),
        "text_input": TEXT.filter(bool),
        "messages": MESSAGES.map(json.dumps),
        "structured_outputs": _STRUCTURED.map(json.dumps),
        "response_format": (_FORMAT | _JSON_SCHEMA).map(json.dumps),
    },
}
VALUES_OF["/v1/responses/input_tokens"] = VALUES_OF["/v1/responses"]
for _path in ("/v1/messages", "/v1/messages/count_tokens"):
    VALUES_OF[_path] = {
        "messages": st.lists(
            _objects({"role": st.sampled_from(["user", "assistant"]), "content": TEXT | st.lists(_BLOCK, max_size=3)}),
            max_size=2,
        ).map(lambda before: [*before, {"role": "user", "content": "What is the capital of Spain?"}]),
        "tools": st.lists(_objects({"name": _NAME, "input_schema": _PARAMETERS}), min_size=1, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}]),
    }
# Fields whose values ask for what a server cannot do, so they are null or left out of right bodies.
REFUSED = {"previous_response_id", "conversation", "background", "chat_template"}
# What keeps answers short, and is in each body that has it, unless it is changed.
ALWAYS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
# What `generate` is not sent: a second prompt, `stream`, which its path says, time limits, and what is never taken.
_NOT_SENT = {
    "exclude_input_in_output",
    "input_ids",
    "messages",
    "describe",
    "image",
    "embedding_request",
    "stream",
    "sampling_parameters",
} | {*("tenant", "timeout")}
PATHS = (*BODIES, "/invocations", GENERATE)


_PLAIN: dict[Any, Strategy] = {
    bool: st.booleans(),
    int: st.integers(0, 5),
    float: st.floats(0, 1),
    str: TEXT,
    NoneType: st.none(),
}


def _of_type(hint: Any) -> Strategy:
    """Values of a field's type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found: list[Strategy] = []
    for kind in kinds:
        if kind is Any or get_origin(kind) is dict:
            found.append(st.none() if kind is Any else st.builds(dict))
        elif get_origin(kind) is list:
            found.append(st.lists(_of_type(get_args(kind)[0]), max_size=2))
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            fields = {each.encode_name: _of_type(each.type) for each in msgspec.structs.fields(kind)}
            found.append(_objects({}, fields))
        else:
            plain = {
                bool: st.booleans(),
                int: st.integers(0, 5),
                float: st.floats(0, 1),
                str: TEXT,
                NoneType: st.none(),
            }
            found.append(plain[kind])
    return st.one_of(found)


def _fields(path: str) -> Iterator[tuple[str, Strategy, bool]]:
    """Name and values of each field of an endpoint, and whether it is in every right body."""
    own = VALUES_OF.get(path, {})
    if path == GENERATE:
        for name in (*(parameter.name for parameter in PARAMETERS), COUNT, SIDE, *INPUTS):
            if name not in _NOT_SENT:
                yield name, own.get(name, VALUES.get(name, st.booleans())), name in ("text_input", "max_tokens")
        return
    for field in msgspec.structs.fields(BODIES[path][0]):
        name = field.encode_name
        if name not in REFUSED and name != "stream":
            values = own.get(name, VALUES.get(name))
            values = _of_type(field.type) if values is None else values
            yield name, values, field.required or name in ALWAYS


def right_bodies(path: str) -> Strategy:
    """Bodies with the fields that an endpoint needs and a few of the others."""
    if path == "/invocations":
        return right_bodies("/v1/chat/completions") | right_bodies("/v1/completions")
    fields = list(_fields(path))
    needed = {name: values for name, values, is_needed in fields if is_needed}
    others = {name: values for name, values, _ in fields if name not in needed}
    if path == "/tokenize":
        of_chat = others.pop("messages"), others.pop("prompt")
        given = st.sampled_from(["messages", "prompt"]).flatmap(
            lambda name: of_chat[name == "prompt"].map(lambda value: {name: value})
        )
    else:
        given = st.fixed_dictionaries(needed)
    some = st.lists(st.sampled_from(sorted(others)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: others[name] for name in names})
    )
    return st.builds(dict.__or__, given, some)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Right bodies, and such in which a value or two, at any depth, are others, left out or added. The seed is there,
    so that two answers to it are the same."""
    # A value may be one that the strategy has made once.
    body: dict[str, Any] = copy.deepcopy(draw(right_bodies(path)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        _change(draw, body)
    body["seed"] = draw(VALUES["seed"])
    return _finished(path, body)


def _positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with each of its keys or indices, and None for one that it has not."""
    yield value, None
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _positions(value[key])


# One of each kind of JSON, and such whose inside is of another kind than its reader may expect.
KINDS: tuple[Any, ...] = (
    None,
    True,
    5,
    -1.5,
    "x",
    [],
    {},
    [5],
    [None],
    [[]],
    [{}],
    {"type": []},
    {"type": {}},
    {"x": 5},
)
_TEXT_PART = {"type": "text", "text": "a"}
_F = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_S = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"], "additionalProperties": False}
# For each endpoint, bodies that have all of its objects and lists in them.
FULL: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {
            "messages": [
                {"role": "system", "content": [_TEXT_PART]},
                {"role": "assistant", "reasoning": "r", "content": None, "tool_calls": [_CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "5"},
            ],
            "tools": [{"type": "function", "function": _F}, {"type": "web_search"}],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": _F}]}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _S, "strict": True}},
            "logit_bias": {"5": 1.0},
            "chat_template_kwargs": {"x": [1]},
            "stop": ["a"],
            "max_tokens": 1,
        },
        {
            "messages": [_TEXT_PART | {"role": "user", "content": "a"}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }
        | {"tools": [{"function": _F}], "structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 1},
    ),
    "/v1/completions": (
        {"prompt": ["a", [5, 6], "b"], "logit_bias": {"5": 1.0}, "stop_token_ids": [5]}
        | {"max_tokens": 1, "structured_outputs": {"json": _S}},
    ),
    "/v1/responses": (
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": []},
                {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "i"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "5"},
            ],
            "tools": [
                {"type": "function", **_F},
                {"type": "custom", "name": "g", "format": {"type": "text"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", **_F}]},
                {"type": "web_search", "filters": {}},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": _S}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "max_output_tokens": 1,
        },
        {"input": "a", "tools": [{"type": "function", **_F}], "tool_choice": {"type": "function", "name": "f"}},
    ),
    "/v1/messages": (
        {
            "system": [{**_TEXT_PART, "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        _TEXT_PART,
                        {"type": "document", "source": {"type": "text", "data": "d"}},
                        {"type": "document", "source": {"type": "content", "content": "d"}},
                        {"type": "search_result", "content": [_TEXT_PART]},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                        {"type": "server_tool_use", "id": "d"},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [_TEXT_PART]}]},
            ],
            "tools": [
                {"name": "f", "description": "d", "input_schema": _S, "strict": True},
                {"type": "web_search_20250305", "name": "w"},
            ],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": _S}, "effort": "low"},
            "stop_sequences": ["a"],
            "metadata": {"user_id": "u"},
            "max_tokens": 1,
        },
    ),
    GENERATE: (
        {"text_input": "a", "max_tokens": 1, "stop": '["a"]', "logit_bias": '{"5": 1}', "temperature": 0.5, "seed": 1},
    ),
}
FULL["/v1/messages/count_tokens"] = tuple(
    {name: value for name, value in body.items() if name not in ("max_tokens", "stop_sequences")}
    for body in FULL["/v1/messages"]
)
FULL["/tokenize"] = tuple(
    {name: body[name] for name in ("messages", "tools", "tool_choice")} for body in FULL["/v1/chat/completions"]
)
FULL["/detokenize"] = ({"tokens": [5, 6]},)
FULL["/v1/responses/input_tokens"] = FULL["/v1/responses"]
FULL["/invocations"] = FULL["/v1/chat/completions"] + FULL["/v1/completions"]


def full_bodies(path: str) -> list[dict[str, Any]]:
    """Right bodies that have all objects and lists of an endpoint in them."""
    return [_finished(path, copy.deepcopy(body)) for body in FULL[path]]


def changed_bodies(path: str) -> Iterator[dict[str, Any]]:
    """Bodies with all objects and lists of an endpoint, of which one place after the other is left out, or of each kind
    of JSON; the seed is there as in `bodies`."""
    for full in FULL[path]:
        for number, (_, key) in enumerate(_positions(full)):
            for kind in (*KINDS, ...) if key is not None else ():
                body = copy.deepcopy(full)
                where = next(itertools.islice(_positions(body), number, None))[0]
                if kind is ...:
                    del where[key]
                else:
                    where[key] = copy.deepcopy(kind)
                yield _finished(path, body)


def _finished(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body with what makes two answers to it the same."""
    if path not in ("/tokenize", "/detokenize"):
        body.setdefault("seed", 1)
    else:
        body.pop("seed", None)
    if path == GENERATE:
        # A stream cannot have the prompt.
        body["exclude_input_in_output"] = True
    return body


def _change(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Change one place of a body, at any depth."""
    where, key = draw(st.sampled_from(list(_positions(body))))
    if key is not None and draw(st.integers(0, 3)) == 0:
        del where[key]
    elif key is not None:
        where[key] = draw(JSON)
    elif isinstance(where, dict):
        where[draw(st.sampled_from(["x", "type", "temperature", "tools"]))] = draw(JSON)
    else:
        where.append(draw(JSON))


__all__ = ["BODIES", "GENERATE", "JSON", "PATHS", "TEXT", "bodies", "changed_bodies", "full_bodies", "right_bodies"]
