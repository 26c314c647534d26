"""Typed access to a checkpoint's JSON files: every field is checked, every error names file, field and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

MAX_CONFIG_BYTES = 16 * 1024 * 1024
Value = TypeVar("Value")


class JsonReader:
    """The fields of one JSON object. `where` is shown in errors, for instance `.../config.json`.

    A missing field and a null one mean the same: the default, or an error without one. Where they differ in meaning,
    `in` tells them apart.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    @classmethod
    def load(cls, path: Path) -> JsonReader:
        """Read a JSON object from a file. Raises `CheckpointError` when it is missing, too large or no object."""
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; that is no model config")
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; a model directory needs it") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of thousands of digits
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} holds {type(data).__name__}; expected a JSON object")
        made_of = data.get("gguf")
        of = f"{made_of['file']}, converted to " if isinstance(made_of, dict) and "file" in made_of else ""
        return cls(data, f"{of}{path}")

    def __contains__(self, field: str) -> bool:
        """Whether the field is there at all, null included."""
        return field in self.data

    def given(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(field) is not None

    def fail(self, field: str, expected: str) -> CheckpointError:
        """The error for a field with the wrong value."""
        if self.data.get(field) is None:
            return CheckpointError(f"{self.where}: field '{field}' is missing; expected {expected}")
        return CheckpointError(f"{self.where}: field '{field}' is {shown(self.data[field])}; expected {expected}")

    def integer(self, field: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        """An integer in `[low, high]`."""
        expected = f"an integer from {low} to {high}"
        return self._read(field, default, lambda value: type(value) is int and low <= value <= high, expected)

    def number(
        self, field: str, default: float | None = None, low: float = 0.0, high: float = sys.float_info.max
    ) -> float:
        """A finite number in `[low, high]`; above 0 where `low` is 0."""
        expected = f"a number of at least {low:g}" if low else "a number above 0"
        expected += "" if high == sys.float_info.max else f" and at most {high:g}"

        def is_valid(value: Any) -> bool:
            # A comparison with not-a-number is false, and one of a huge integer exact.
            return type(value) in (int, float) and low <= value <= high and value > 0

        return float(self._read(field, default, is_valid, expected))

    def boolean(self, field: str, default: bool) -> bool:
        """True or false."""
        return self._read(field, default, lambda value: isinstance(value, bool), "true or false")

    def string(self, field: str, default: str | None = None) -> str:
        """A string."""
        return self._read(field, default, lambda value: isinstance(value, str), "a string")

    def strings(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty when the field is missing."""
        return tuple(self._list(field, str, "a list of strings"))

    def integers(self, field: str, low: int = 0) -> tuple[int, ...] | None:
        """A list of at least one integer of at least `low`; None when the field is missing or null."""
        if not self.given(field):
            return None
        value = self.data[field]
        if not isinstance(value, list) or not value or not all(type(i) is int and low <= i <= 2**31 for i in value):
            raise self.fail(field, f"a list of integers of at least {low}")
        return tuple(value)

    def layer_types(self, num_layers: int, *kinds: str) -> tuple[str, ...] | None:
        """`layer_types`, one of two `kinds` for each layer; None when the field is missing."""
        if not self.given("layer_types"):
            return None
        types = self.strings("layer_types")
        if len(types) != num_layers or not {*types} <= {*kinds}:
            raise self.fail("layer_types", f"'{kinds[0]}' or '{kinds[1]}' for each of the {num_layers} layers")
        return types

    def object(self, field: str, required: bool = False) -> JsonReader:
        """A nested object; an empty one when it is missing and not required."""
        missing: dict[str, Any] | None = None if required else {}
        value = self._read(field, missing, lambda value: isinstance(value, dict), "an object")
        return JsonReader(value, f"{self.where}: {field}")

    def objects(self, field: str) -> tuple[JsonReader, ...]:
        """A list of objects; empty when the field is missing."""
        items = self._list(field, dict, "a list of objects")
        return tuple(JsonReader(item, f"{self.where}: {field}[{i}]") for i, item in enumerate(items))

    def _read(self, field: str, default: Value | None, is_valid: Callable[[Any], bool], expected: str) -> Value:
        value: Any = self.data.get(field)
        if value is None and default is not None:
            return default
        if not is_valid(value):
            raise self.fail(field, expected)
        found: Value = value
        return found

    def _list(self, field: str, kind: type, expected: str) -> list[Any]:
        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, kind) for item in value)

        return self._read(field, [], is_valid, expected)
