"""Strategies for requests that the server must refuse: gRPC messages and HTTP bodies."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from checks.wire import add, packed, request
from dflash_backend.tenant_names import TENANT_NAME
from dflash_backend.text.sampling_params import PARAMETERS
from dflash_backend.text.vllm_parameters import OTHER_NAMES, VLLM_PARAMETERS

Strategy = st.SearchStrategy[Any]

# Triton's HTTP front end may round what it reads, so numbers are out of their bounds by at least this.
MARGIN = 0.01
# Texts that are no number, no truth value and no JSON.
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="[{"), min_size=1, max_size=40).filter(
    lambda text: not set(text) <= set("+-.0123456789eE") and text[:8].strip().lower() not in ("true", "false", "0", "1")
)
FRACTIONS = st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer())
NO_TEXT = st.integers(-(2**63), 2**63 - 1) | st.booleans() | FRACTIONS
NESTED: Strategy = st.sampled_from([[], {}, [[1]], {"a": {"b": []}}])


def _integers(low: int, high: int = 2**63 - 1) -> Strategy:
    """Values for a parameter that takes integers from `low` to `high`."""
    outside = st.integers(-(2**63), low - 1)
    if high < 2**63 - 1:
        outside |= st.integers(high + 1, 2**63 - 1)
    texts = outside.map(str) | st.sampled_from(["1e400", "9" * 5000, "1_0", " 7", "\uff11", "2.5"])
    return outside | texts | FRACTIONS | FRACTIONS.map(str) | WORDS


def _numbers(low: float, high: float = float("inf")) -> Strategy:
    """Values for a parameter that takes numbers from `low` to `high`."""
    outside = st.floats(-1e300, low - MARGIN)
    if high < float("inf"):
        outside |= st.floats(high + MARGIN, 1e300)
    return outside | outside.map(str) | st.booleans() | st.sampled_from(["nan", "inf", "-Infinity", "1e999"]) | WORDS


def _lists(values: Strategy) -> Strategy:
    return st.lists(values, min_size=1, max_size=5).map(json.dumps)


def _objects(keys: Strategy, values: Strategy) -> Strategy:
    return st.dictionaries(keys.map(str), values, min_size=1, max_size=5).map(json.dumps)


def _repeated(text: str, least: int) -> Strategy:
    return st.integers(least, 2 * least).map(lambda count: text * count)


_TRUTH = st.integers(2, 99) | st.integers(-99, -1) | FRACTIONS | WORDS
_PENALTY = _numbers(-2, 2)
_TOKEN_IDS = st.integers(-(2**63), -1) | st.integers(10**7, 2**63 - 1) | FRACTIONS | WORDS
_NAMES = {parameter.name for parameter in PARAMETERS} | {*VLLM_PARAMETERS, *OTHER_NAMES, "best_of", "id"}

# Values that must be refused, by the name of the sampling parameter.
PARAMETER_VALUES: dict[str, Strategy] = {
    "max_tokens": _integers(1) | st.booleans(),
    "min_tokens": _integers(0, 10**9) | st.booleans(),
    "temperature": _numbers(0),
    "top_p": _numbers(0.005, 1),
    "top_k": _integers(-1),
    "min_p": _numbers(0, 1),
    "seed": FRACTIONS | WORDS | (st.integers(2**64) | st.integers(max_value=-(2**63) - 1)).map(str),
    "n": _integers(1, 64),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _numbers(0.01, 100),
    "logprobs": _integers(0, 20),
    "logit_bias": WORDS
    | NO_TEXT.map(json.dumps)
    | _objects(_TOKEN_IDS, st.floats(-9, 9))
    | _objects(st.integers(0, 500), WORDS | st.booleans())
    | _repeated("[", 5000),
    "stop": NO_TEXT
    | _lists(NO_TEXT | st.just(""))
    | _repeated("y", 1025)
    | st.sampled_from(["", '["\\ud800"]', json.dumps(["x"] * 65)]),
    "stop_token_ids": _TOKEN_IDS | _lists(_TOKEN_IDS) | st.just(json.dumps([1] * 1025)),
    "ignore_eos": _TRUTH,
    "include_stop_str_in_output": _TRUTH,
    "skip_special_tokens": _TRUTH,
    "record_traffic": _TRUTH,
    "num_speculative_tokens": _integers(0, 64),
    "cache_salt": NO_TEXT | _repeated("s", 1025),
    "tenant": NO_TEXT | WORDS.filter(lambda text: not TENANT_NAME.fullmatch(text)),
    "lora_name": st.just("doll"),
    "best_of": st.integers(2, 64),
    "use_beam_search": st.just(True),
    "detokenize": st.just(False),
    "prompt_logprobs": _integers(0, 20),
    "structured_outputs": st.sampled_from(
        ['{"choice": []}', "{}", '{"json": 5}', '{"regex": ""}', '{"json": {}, "x": 1}']
    ),
    "response_format": st.sampled_from(['{"type": "xml"}', "{}", '{"type": "json_schema"}']),
}
_UNKNOWN = WORDS.filter(lambda name: name not in _NAMES and not name.startswith("triton_"))
PARAMETERS_REFUSED: Strategy = st.sampled_from(sorted(PARAMETER_VALUES)).flatmap(
    lambda name: st.tuples(st.just(name), PARAMETER_VALUES[name])
) | st.tuples(_UNKNOWN | st.just("max_token"), WORDS)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


# JSON texts in place of an object of sampling parameters, and in place of a list of messages.
NO_OBJECTS: Strategy = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not _is_object(text)
) | st.sampled_from(["null", "[" * 100_000, '{"a":' * 3000, '{"seed": NaN}', '{"seed": 1, "seed": 2}'])
_JSON = st.recursive(
    st.none() | NO_TEXT | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "name", "text"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_CONTENT = st.none() | NO_TEXT | st.just({"a": [1]}) | st.just("\ud83d")
NO_MESSAGES: Strategy = (
    _JSON.map(json.dumps)
    | _CONTENT.map(lambda content: json.dumps([{"role": "user", "content": content}]))
    | st.sampled_from(["hello", '[{"role": 5, "content": "x"}]', "[" * 900 + "]" * 900, "[" * 100_000])
)
# Bytes that are no UTF-8.
NO_UTF8: Strategy = st.binary(max_size=30).map(lambda data: data + b"\xff")

_PROMPTS = {"text_input": "a", "messages": '[{"role": "user", "content": "a"}]', "input_ids": [1]}
# No prompt, two of them, an empty or a too long one, or ids that are no tokens.
_INPUTS: Strategy = (
    st.sampled_from([{k: v for k, v in _PROMPTS.items() if k != left_out} for left_out in _PROMPTS])
    | _repeated("word ", 3000).map(lambda text: {"text_input": text})
    | st.integers(1024, 5000).map(lambda count: {"input_ids": [5] * count})
    | (st.integers(-(2**63), -1) | st.integers(10**7, 2**63 - 1)).map(lambda token_id: {"input_ids": [1, token_id]})
    | st.sampled_from([{}, {"text_input": ""}, {"input_ids": []}])
    | st.just({"text_input": "a", "stream": True, "exclude_input_in_output": False})
)
_SIZES = {"INT32": 4, "FP32": 4, "UINT8": 1, "INT64": 8, "BOOL": 1}
_TYPES = {"text_input": "BYTES", "messages": "BYTES", "input_ids": "INT64", "stream": "BOOL"}
_WRONG_TYPES = [(name, kind) for name, right in _TYPES.items() for kind in _SIZES if kind != right]


def _tensor(name: str, datatype: str, shape: list[int], data: bytes) -> Any:
    """A request with one tensor, and with a prompt where that is not the tensor."""
    message = request() if name in _PROMPTS else request(text_input="a")
    add(message, name, datatype, shape, data)
    return message


def _shaped(name: str, shape: list[int]) -> Any:
    datatype, element = ("BOOL", b"\0") if name == "stream" else ("BYTES", packed("{}"))
    return _tensor(name, datatype, shape, element * math.prod(shape))


NO_DATA = request()
NO_DATA.inputs.add(name="text_input", datatype="BYTES", shape=[1])
_COUNTS = st.integers(2, 5)
_SHAPES = _COUNTS.flatmap(lambda count: st.sampled_from([[count], [1, count], [count, 1], [1, 1]]))
_NESTED_PARAMETERS = st.tuples(st.sampled_from(["max_tokens", "temperature", "top_k", "seed"]), NESTED)

# `ModelInferRequest`s that must be refused.
GRPC_REQUESTS: Strategy = st.one_of(
    PARAMETERS_REFUSED.map(lambda pair: request({pair[0]: pair[1]}, text_input="a")),
    (PARAMETERS_REFUSED | _NESTED_PARAMETERS).map(
        lambda pair: request(text_input="a", sampling_parameters=json.dumps(dict([pair])))
    ),
    NO_OBJECTS.map(lambda text: request(text_input="a", sampling_parameters=text)),
    NO_MESSAGES.map(lambda text: request(messages=text)),
    st.sampled_from(["text_input", "messages"]).flatmap(lambda name: NO_UTF8.map(lambda data: request(**{name: data}))),
    NO_UTF8.map(lambda data: request(text_input=b"a", sampling_parameters=data)),
    _INPUTS.map(lambda inputs: request(**inputs)),
    st.sampled_from(_WRONG_TYPES).map(lambda wrong: _tensor(*wrong, [1], bytes(_SIZES[wrong[1]]))),
    st.builds(_shaped, st.sampled_from(["text_input", "stream", "sampling_parameters"]), _SHAPES),
    st.binary(max_size=3).map(lambda data: _tensor("text_input", "BYTES", [1], data)),
    st.just(_tensor("text_input", "BYTES", [1], b"\xff\xff\xff\x7fabc")),
    st.integers(2, 9).map(lambda count: _tensor("input_ids", "INT64", [count], bytes(8))),
    st.just(NO_DATA),
    st.sampled_from(["image", "prompt", "embedding_request", ""]).map(
        lambda name: _tensor(name, "BYTES", [1], packed("x"))
    ),
)
_WHOLE = json.dumps({"text_input": "a b c", "max_tokens": 3}).encode()


def _body(**fields: Any) -> bytes:
    return json.dumps({"text_input": "a", **fields}).encode()


# Bodies for `generate` that must be refused.
HTTP_BODIES: Strategy = st.one_of(
    PARAMETERS_REFUSED.map(lambda pair: _body(**{pair[0]: pair[1]})),
    st.sampled_from(["max_tokens", "seed", "stop", "anything"]).flatmap(
        lambda name: (NESTED | st.none()).map(lambda value: _body(**{name: value}))
    ),
    st.integers(0, len(_WHOLE) - 1).map(lambda length: _WHOLE[:length]),
    NO_OBJECTS.map(lambda text: _body(sampling_parameters=text)),
    NO_MESSAGES.map(lambda text: json.dumps({"messages": text}).encode()),
    st.sampled_from(["text_input", "messages", "sampling_parameters"]).flatmap(
        lambda name: (NO_TEXT | NESTED | st.none() | st.just(["a", "b"])).map(lambda value: _body(**{name: value}))
    ),
    NO_UTF8.map(lambda data: b'{"text_input": "' + data.replace(b'"', b"x").replace(b"\\", b"x") + b'"}'),
)
