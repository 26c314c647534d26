"""Reads single values of parameters, which may be text: None stands for a value that is not allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from dflash_backend.text.client_json import JsonError, NotJsonError, is_text, read_json

INT64_MAX = 2**63 - 1
# A parameter's own JSON text, as in "stop": "[\"a\", \"b\"]". The text around it was measured before.
MAX_NESTED_CHARS = 64_000_000
MAX_NESTED_BRACKETS = 5000
MAX_NESTED_COMMAS = 1_000_000
# JSON's numbers, and 1., .5 and +1, which people write. Python also reads 1_0, " 1" and digits of other alphabets.
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_INTEGER_CHARS = 64
MAX_NUMBER_CHARS = 400


def read_int(value: Any) -> int | None:
    """An integer, of a number or text."""
    if isinstance(value, str):
        return int(value) if len(value) <= MAX_INTEGER_CHARS and _INTEGER.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def whole_number(value: Any) -> Any:
    """A float that is a whole number of 64 bits as an integer; any other value as it is."""
    if type(value) is float and value.is_integer() and -(2**63) <= value < 2**64:
        return int(value)
    return value


def read_float(value: Any) -> float | None:
    """A finite number, of a number or text."""
    if isinstance(value, str):
        if len(value) > MAX_NUMBER_CHARS or not _NUMBER.fullmatch(value):
            return None
    elif isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_bool(value: Any) -> bool | None:
    """True or false, of a boolean, 1 or 0, or text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value[:8].strip().lower())
    return {1: True, 0: False}.get(value) if isinstance(value, int) else None


def read_nested(text: str) -> Any:
    """The value of a JSON text that is itself a value. Raises `JsonError`."""
    return read_json(text, max_chars=MAX_NESTED_CHARS, max_brackets=MAX_NESTED_BRACKETS, max_commas=MAX_NESTED_COMMAS)


def read_object(value: Any) -> Mapping[Any, Any] | None:
    """An object, or its JSON text; None for anything else."""
    if isinstance(value, str):
        try:
            value = read_nested(value)
        except JsonError:
            return None
    return value if isinstance(value, Mapping) else None


def read_list(value: Any) -> list[Any] | tuple[Any, ...]:
    """A list as it is, a JSON list out of a string, and anything else as the only element."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str) and value[:1] == "[":
        try:
            items = read_nested(value)
        except NotJsonError:
            return [value]
        except JsonError:
            return [None]
        if isinstance(items, list):
            return items
    return [value]


def texts_within(max_items: int, max_chars: int, max_chars_together: int) -> tuple[Callable[[Any], Any], str]:
    """Reads a text or a list of texts, each once, none of which may be empty; and what is allowed, in words."""

    def read_texts(value: Any) -> tuple[str, ...] | None:
        texts, left = read_list(value), max_chars_together
        if len(texts) > max_items:
            return None
        for text in texts:
            if not isinstance(text, str) or not 0 < len(text) <= min(left, max_chars) or not is_text(text):
                return None
            left -= len(text)
        return tuple(dict.fromkeys(texts))

    return read_texts, (
        f"a string or a list of at most {max_items} strings, each of 1 to {max_chars} characters and together at "
        f"most {max_chars_together}"
    )


def text_that(is_allowed: Callable[[str], object]) -> Callable[[Any], str | None]:
    """Reads a text that is allowed."""
    return lambda value: value if isinstance(value, str) and is_allowed(value) else None


def within(read: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    """`read`, but None for numbers outside of `low` to `high`."""

    def read_within(value: Any) -> Any:
        number = read(value)
        return number if number is not None and low <= number <= high else None

    return read_within


def int_from(low: int, high: int = INT64_MAX) -> Callable[[Any], Any]:
    """Reads integers from `low` to `high`."""
    return within(read_int, low, high)


def float_within(low: float, high: float = math.inf) -> Callable[[Any], Any]:
    """Reads numbers from `low` to `high`."""
    return within(read_float, low, high)
