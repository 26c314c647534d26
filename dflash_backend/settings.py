"""What a setting is: its type and bounds, how its text is parsed, and the error for a value that is not allowed.

`config.EngineConfig` declares each setting once, as a field made by `setting`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
# Larger numbers overflow in sums and products where they are used.
MOST = 1_000_000_000
_METADATA_KEY = "setting"


class ConfigError(ValueError):
    """A setting is unknown or has a value that is not allowed. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    help: what it does, for the docs and config.pbtxt.
    choices: the allowed values; empty for any.
    refused: values that are not allowed and likely to be given, each with why and what would work.
    low, high: bounds of a number; `low_open` excludes `low` itself.
    check: raises ValueError, with a sentence, for a text that is not allowed.
    is_object: whether the text is a JSON object, or empty; a value may then be such an object itself.
    name, kind, auto, default: filled in from the field. `kind` is `str`, `int`, `float` or `bool`; with `auto` the word
        "auto" is allowed and stands for None.
    """

    help: str
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    low: float = 0
    high: float = MOST
    low_open: bool = False
    check: Callable[[str], object] | None = None
    is_object: bool = False
    name: str = ""
    kind: type = str
    auto: bool = False
    default: Any = None

    @property
    def allowed(self) -> str:
        """The allowed values in words, as in "auto or an integer from 1 to 1024"."""
        if self.choices:
            words = list(self.choices)
        elif self.kind is bool:
            words = ["true", "false"]
        elif self.kind is str:
            words = ["a JSON object"] if self.is_object else ["text"]
        else:
            noun = "an integer" if self.kind is int else "a number"
            # Without an exponent, which few people read.
            low, high = (str(int(bound)) if bound == int(bound) else f"{bound:g}" for bound in (self.low, self.high))
            words = [f"{noun} {'above' if self.low_open else 'from'} {low} to {high}"]
        return " or ".join(([AUTO] if self.auto else []) + words)

    def parse(self, value: Any, source: str) -> Any:
        """Turn `value` (a string, or already of the right type) into the setting's type.

        Raises `ConfigError` with the name, the value, what is allowed and `source`, the place the value came from.
        """
        text = value.strip() if isinstance(value, str) else value
        if self.auto and (text is None or (isinstance(text, str) and text.lower() == AUTO)):
            return None
        parsed: Any = None
        if self.kind is bool:
            parsed = parse_bool(text)
        elif self.kind is str and self.is_object:
            parsed = _object_text(text)
        elif self.kind is str:
            parsed = str(text) if isinstance(text, str | os.PathLike) else None
        else:
            parsed = _parse_number(text, self.kind)
        if parsed is None or not self._within_bounds(parsed):
            reason = self.refused.get(str(text).lower())
            raise ConfigError(
                f"setting '{self.name}' has the value {value!r} ({source}); allowed: {self.allowed}"
                + (f"; {reason}" if reason else "")
            )
        if self.check is not None:
            try:
                self.check(parsed)
            except ValueError as error:
                raise ConfigError(f"setting '{self.name}' has the value {value!r} ({source}): {error}") from None
        return parsed

    def _within_bounds(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float):
            return True
        return bool(self.low < value <= self.high or (value == self.low and not self.low_open))


def setting(default: Any, help: str, **bounds: Any) -> Any:
    """A dataclass field that declares a setting, with `bounds` for the other arguments of `Setting`.

    The field's annotation is the type of the setting; `| None` allows "auto".
    """
    return dataclasses.field(default=default, metadata={_METADATA_KEY: Setting(help, **bounds)})


def settings_of(config: type) -> tuple[Setting, ...]:
    """The settings that a dataclass declares, in the order of its fields."""
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        if _METADATA_KEY in field.metadata:
            hint = hints[field.name]
            auto = isinstance(hint, types.UnionType)
            kind = typing.get_args(hint)[0] if auto else hint
            declared = field.metadata[_METADATA_KEY]
            found.append(dataclasses.replace(declared, name=field.name, kind=kind, auto=auto, default=field.default))
    return tuple(found)


def as_text(value: Any) -> str:
    """The text that parses to `value`."""
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def check_endpoint(text: str) -> None:
    """Raise ValueError unless `text` is an address of ZeroMQ that a server can be at, or empty."""
    if text and not re.fullmatch(r"ipc://.+|tcp://(\*|[\w.:\[\]-]+):\d{1,5}", text):
        raise ValueError("allowed: tcp://HOST:PORT, with * for all addresses of this machine, ipc://FILE, or nothing")


def parse_bool(value: Any) -> bool | None:
    """A bool, or "true", "false", "1" or "0" in any case, as a bool; None for anything else."""
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def _object_text(value: Any) -> str | None:
    """The JSON text of an object, given as text or as it is; of a text that is empty, that; else None."""
    try:
        if isinstance(value, Mapping):
            return json.dumps(value, allow_nan=False)
        return value if value == "" or isinstance(json.loads(value), dict) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _parse_number(value: Any, kind: type) -> int | float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
        if kind is float:
            return number if math.isfinite(number) else None
        return int(value) if not isinstance(value, float) else (int(value) if value.is_integer() else None)
    except (TypeError, ValueError, OverflowError):
        return None
