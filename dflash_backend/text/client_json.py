"""Reads JSON from clients, strictly and at a bounded cost.

The thread that reads requests shares one interpreter with the thread that sends all responses, and a JSON reader holds
the interpreter until it is done. So cheap searches measure a text before it is read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

# Longer numbers are not allowed anywhere, and Python does not read numbers of thousands of digits.
MAX_DIGITS = 100
MAX_DEPTH = 16
# Each comma outside of strings has a value behind it.
MAX_COMMAS = 20_000
# An entry of a logit bias, such as "151935": -12.345678, with what surrounds it.
BIAS_CHARS = 24
# How much of a value an error message shows.
MAX_QUOTED_CHARS = 200
MAX_QUOTED_ITEMS = 20
MAX_QUOTED_DEPTH = 3
# Integers are measured one by one only where a text has more digits in a row than are allowed.
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CONTAINERS = frozenset((dict, list))
# Types of values in which there is no text to look for.
WITHOUT_TEXT = frozenset((int, float, bool, type(None)))


class JsonError(ValueError):
    """A text is not JSON that is accepted. The message is for the client and completes a sentence."""


class NotJsonError(JsonError):
    """A text is no JSON at all."""


def read_json(
    text: str, *, max_chars: int, max_brackets: int, max_commas: int = MAX_COMMAS, max_depth: int = MAX_DEPTH
) -> Any:
    """The value of a JSON text.

    Raises `JsonError` for: text that is no JSON; more than `max_chars` characters; outside of strings more than
    `max_brackets` opening brackets and braces, or more than `max_commas` commas; nesting deeper than `max_depth`; NaN
    and infinities; integers of more than 100 digits; a key twice in one object; half a surrogate pair, which has no
    UTF-8 form.
    """
    if len(text) > max_chars:
        raise JsonError(f"has {len(text)} characters; allowed: at most {max_chars}")
    brackets, commas = count_parts(text, max_brackets, max_commas)
    if brackets > max_brackets:
        raise JsonError(f"is nested too deeply or has too many parts: {brackets} brackets; allowed: {max_brackets}")
    if commas > max_commas:
        raise JsonError(f"has too many parts: {commas} commas outside of strings; allowed: {max_commas}")
    # A Python function for each integer would take most of the time.
    parse_int = _short_int if _TOO_MANY_DIGITS in text.encode("utf-8", "replace").translate(_DIGITS_TO_ZERO) else None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=parse_int)
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    except ValueError as error:
        raise NotJsonError(f"is not JSON: {error}") from None
    if brackets > max_depth and _deeper_than(value, max_depth):
        raise JsonError(f"is nested too deeply; allowed: {max_depth} levels")
    if _SURROGATE.search(text) and not is_text("".join(texts(value))):
        raise JsonError("has half a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value


def is_text(value: str) -> bool:
    """Whether a string has a UTF-8 form: half a surrogate pair has none."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def count_parts(text: str, max_brackets: int, max_commas: int) -> tuple[int, int]:
    """How many opening brackets and braces a JSON text has outside of its strings, and how many commas. Those in
    strings may count as well where there are not more than allowed."""
    brackets, commas = _brackets_and_commas(text)
    if brackets <= max_brackets and commas <= max_commas:
        return brackets, commas
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    return _brackets_and_commas("".join(text.split('"')[::2]))


def _brackets_and_commas(text: str) -> tuple[int, int]:
    return text.count("[") + text.count("{"), text.count(",")


def texts(value: Any) -> list[str]:
    """The texts that `value` consists of, keys included, beside lists, mappings and what is no text."""
    found: list[str] = []
    _add_texts([value], found)
    return found


def _add_texts(value: Any, found: list[str]) -> None:
    items: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        items = value
    elif type(value) is dict or isinstance(value, Mapping):  # the second takes ten times as long
        items = itertools.chain.from_iterable(value.items())
    for item in [item for item in items if type(item) not in WITHOUT_TEXT]:
        if isinstance(item, str):
            found.append(item)
        else:
            _add_texts(item, found)


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
    level = [value]
    for _ in range(depth):
        level = [one.values() if type(one) is dict else one for one in level if type(one) in _CONTAINERS]
        level = [item for items in level for item in items if type(item) in _CONTAINERS]
    return bool(level)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {quoted(twice)} comes twice in one object")
    return values


def _short_int(digits: str) -> int:
    count = len(digits.lstrip("-"))
    if count > MAX_DIGITS:
        raise ValueError(f"a number has {count} digits, more than {MAX_DIGITS}")
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
