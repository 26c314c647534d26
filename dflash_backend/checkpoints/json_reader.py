"""Typed access to a checkpoint's `config.json`: every field is checked, every error names file, field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.errors import CheckpointError

MAX_CONFIG_BYTES = 16 * 1024 * 1024


class JsonReader:
    """The fields of one JSON object. `where` is shown in errors, for instance `.../config.json`.

    A field that is missing and one that is null are treated alike (trap 6): the default, or an error without one.
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
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} holds {type(data).__name__}; expected a JSON object")
        return cls(data, str(path))

    def fail(self, field: str, expected: str) -> CheckpointError:
        """The error for a field with the wrong value."""
        if self.data.get(field) is None:
            return CheckpointError(f"{self.where}: field '{field}' is missing; expected {expected}")
        return CheckpointError(f"{self.where}: field '{field}' is {self.data[field]!r}; expected {expected}")

    def integer(self, field: str, default: int | None = None, low: int = 1, high: int = 2**31) -> int:
        """An integer in `[low, high]`."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(field, f"an integer from {low} to {high}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(field, "a number above 0")
        if not math.isfinite(value) or value <= 0:
            raise self.fail(field, "a number above 0")
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

    def integers(self, field: str) -> tuple[int, ...] | None:
        """A list of integers of at least 0; None when the field is missing or null."""
        value = self.data.get(field)
        if value is None:
            return None
        ok = isinstance(value, list) and value
        if not ok or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            raise self.fail(field, "a list of integers of at least 0")
        return tuple(value)

    def object(self, field: str, required: bool = False) -> JsonReader:
        """A nested object; an empty one when it is missing and not required."""
        value = self.data.get(field)
        if value is None and not required:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(field, "an object")
        return JsonReader(value, f"{self.where}: {field}")
