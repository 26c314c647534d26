"""Typed access to a checkpoint's JSON files: every field is checked, every error names file, field and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import shown

MAX_CONFIG_BYTES = 16 * 1024 * 1024


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
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}")
        return value

    def number(
        self, field: str, default: float | None = None, low: float = 0.0, high: float = sys.float_info.max
    ) -> float:
        """A finite number in `[low, high]`; above 0 where `low` is 0."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        # A comparison with not-a-number is false, and one of a huge integer exact.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or value <= 0:
            upper = "" if high == sys.float_info.max else f" and at most {high:g}"
            raise self.fail(field, (f"a number of at least {low:g}" if low else "a number above 0") + upper)
        return float(value)

    def boolean(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return value

    def string(self, field: str, default: str | None = None) -> str:
        """A string."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(field, "a string")
        return value

    def strings(self, field: str) -> tuple[str, ...]:
        """A list of strings; empty when the field is missing."""
        value = self.data.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(field, "a list of strings")
        return tuple(value)

    def integers(self, field: str, low: int = 0) -> tuple[int, ...] | None:
        """A list of at least one integer of at least `low`; None when the field is missing or null."""
        value = self.data.get(field)
        if value is None:
            return None
        ok = isinstance(value, list) and value
        if not ok or any(isinstance(i, bool) or not isinstance(i, int) or not low <= i <= 2**31 for i in value):
            raise self.fail(field, f"a list of integers of at least {low}")
        return tuple(value)

    def object(self, field: str, required: bool = False) -> JsonReader:
        """A nested object; an empty one when it is missing and not required."""
        value = self.data.get(field)
        if value is None and not required:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(field, "an object")
        return JsonReader(value, f"{self.where}: {field}")

    def objects(self, field: str) -> tuple[JsonReader, ...]:
        """A list of objects; empty when the field is missing."""
        value = self.data.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(field, "a list of objects")
        return tuple(JsonReader(item, f"{self.where}: {field}[{i}]") for i, item in enumerate(value))
