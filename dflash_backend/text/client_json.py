"""Reads JSON from clients, strictly and at a bounded cost.

The thread that reads requests shares one interpreter with the thread that sends all responses, and a JSON reader holds
the interpreter until it is done. So cheap searches measure a text before it is read.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

# Longer numbers are not allowed anywhere, and Python does not read numbers of thousands of digits.
MAX_DIGITS = 100
MAX_DEPTH = 16
# An entry of a logit bias, such as "151935": -12.345678, with what surrounds it.
BIAS_CHARS = 24
# How much of a value an error message shows.
MAX_QUOTED_CHARS = 200
MAX_QUOTED_ITEMS = 20
MAX_QUOTED_DEPTH = 3


class JsonError(ValueError):
    """A text is not JSON that is accepted. The message is for the client and completes a sentence."""


class NotJsonError(JsonError):
    """A text is no JSON at all."""


def read_json(text: str, *, max_chars: int, max_brackets: int, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text.

    Raises `JsonError` for: text that is no JSON; more than `max_chars` characters; more than `max_brackets` opening
    brackets and braces, those in strings included; nesting deeper than `max_depth`; NaN and infinities; a key twice in
    one object; half a surrogate pair, which has no UTF-8 form.
    """
    if len(text) > max_chars:
        raise JsonError(f"has {len(text)} characters; allowed: at most {max_chars}")
    brackets = text.count("[") + text.count("{")
    if brackets > max_brackets:
        raise JsonError(f"is nested too deeply or has too many parts: {brackets} brackets; allowed: {max_brackets}")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_short_int)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise JsonError("has half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except ValueError as error:
        raise NotJsonError(f"is not JSON: {error}") from None
    if brackets > max_depth and _deeper_than(value, max_depth):
        raise JsonError(f"is nested too deeply; allowed: {max_depth} levels")
    return value


class TokenBiases(dict[int, float]):
    """A logit bias by token id, whose keys and values have their types already."""


class _LongParameters(msgspec.Struct):
    """The one parameter that may be long. No objects are made of the others."""

    logit_bias: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def read_parameters(text: str, *, max_chars: int, max_biases: int, max_brackets: int) -> Any:
    """The value of the JSON text of a request's parameters, as `read_json` reads it.

    Only a `logit_bias` may be longer than `max_chars`, with at most `max_biases` entries. A long one is read into a
    `TokenBiases` by a typed reader, in a fraction of the time. Raises `JsonError`.
    """
    if len(text) <= max_chars:
        return read_json(text, max_chars=max_chars, max_brackets=max_brackets)
    most = max_chars + BIAS_CHARS * max_biases
    if len(text) > most:
        raise JsonError(f"has {len(text)} characters; allowed: at most {most}")
    # Each name and each bias has a colon.
    colons = text.count(":")
    if colons > max_biases + max_chars:
        raise JsonError(f"is too long: it has {colons} colons; allowed: at most {max_biases + max_chars}")
    data = text.encode("utf-8", "replace")
    try:
        raw = bytes(msgspec.json.decode(data, type=_LongParameters).logit_bias)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NotJsonError(f"is no JSON object of parameters: {error}") from None
    if not raw:
        raise JsonError(f"has {len(text)} characters; allowed: at most {max_chars} besides 'logit_bias'")
    begin = data.rfind(raw)
    rest = (data[:begin] + b"null" + data[begin + len(raw) :]).decode("utf-8")
    values = read_json(rest, max_chars=max_chars, max_brackets=max_brackets)
    values["logit_bias"] = _biases(raw, max_biases)
    return values


def _biases(raw: bytes, max_biases: int) -> TokenBiases:
    """A long logit bias, an object or a text that holds its JSON."""
    try:
        if raw.startswith(b'"'):
            raw = msgspec.json.decode(raw, type=str).encode("utf-8", "replace")
        entries = raw.count(b":")
        if entries > max_biases:
            raise JsonError(f"has a logit_bias of {entries} entries; allowed: at most {max_biases}, one for each token")
        biases = msgspec.json.decode(raw, type=dict[int, float])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise JsonError(f"has a logit_bias that is no object from token ids to numbers: {error}") from None
    if len(biases) < entries:
        raise JsonError("has a logit_bias in which a token comes twice")
    return TokenBiases(biases)


def _deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` times. Looks no deeper than that."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {quoted(twice)} comes twice in one object")
    return values


def _short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def quoted(value: Any) -> str:
    """A value as an error message shows it. Only its beginning is looked at, since a client may have sent megabytes."""
    text = repr(_beginning(value, MAX_QUOTED_DEPTH))
    shown = text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
    if isinstance(value, str) and len(value) > MAX_QUOTED_CHARS:
        return f"{shown} ({len(value)} characters)"
    if isinstance(value, list | tuple | Mapping) and len(value) > MAX_QUOTED_ITEMS:
        return f"{shown} ({len(value)} items)"
    return shown


def _beginning(value: Any, depth: int) -> Any:
    """The first characters or items of a value, and of its items."""
    if isinstance(value, str):
        return value[: MAX_QUOTED_CHARS + 1]
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        return "a number of more than 100 digits"
    if depth == 0 and isinstance(value, list | tuple | Mapping):
        return ...
    if isinstance(value, list | tuple):
        return [_beginning(item, depth - 1) for item in value[:MAX_QUOTED_ITEMS]]
    if isinstance(value, Mapping):
        items = itertools.islice(value.items(), MAX_QUOTED_ITEMS)
        return {_beginning(key, 0): _beginning(item, depth - 1) for key, item in items}
    return value
