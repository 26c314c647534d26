"""Sampling parameters from outside, checked: one table of names, types and bounds.

The Triton frontend calls `parse_sampling_params` with what a request carries, `LLM` with what a script passes. Values
may be text, since Triton's request parameters often are.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_backend.messages import SamplingParams

INT64_MAX = 2**63 - 1
# Below this, dividing logits by the temperature overflows float16 and gains nothing over greedy; vLLM's bound too.
LOWEST_TEMPERATURE = 1e-2
TRITON_PREFIX = "triton_"


class ParameterError(ValueError):
    """A sampling parameter is unknown or has a value that is not allowed. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter. `read` turns a value into the parameter's type, or None where it is not allowed;
    `allowed` says in words what is."""

    name: str
    read: Callable[[Any], Any]
    allowed: str

    def parse(self, value: Any) -> Any:
        """The value in the parameter's type. Raises `ParameterError`."""
        parsed = self.read(value)
        if parsed is None:
            raise _not_allowed(self.name, value, self.allowed)
        return parsed


def _read_int(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _read_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_list(value: Any) -> list[Any]:
    """A list as it is, a JSON list out of a string, and anything else as the only element."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError:
            return [value]
        return list(parsed)
    return [value]


def _read_stops(value: Any) -> tuple[str, ...] | None:
    stops = _read_list(value)
    return tuple(stops) if all(isinstance(stop, str) and stop for stop in stops) else None


def _read_token_ids(value: Any) -> tuple[int, ...] | None:
    ids = [_read_int(item) for item in _read_list(value)]
    return tuple(i for i in ids if i is not None) if all(i is not None and i >= 0 for i in ids) else None


def _int_from(low: int, high: int | None = None) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        number = _read_int(value)
        return number if number is not None and number >= low and (high is None or number <= high) else None

    return read


def _float_within(within: Callable[[float], bool]) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        number = _read_float(value)
        return number if number is not None and within(number) else None

    return read


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("max_tokens", _int_from(1), "an integer of at least 1"),
    Parameter("min_tokens", _int_from(0), "an integer of at least 0 and at most max_tokens"),
    Parameter("temperature", _float_within(lambda t: t >= 0), "a finite number of at least 0 (0 is greedy)"),
    Parameter("top_p", _float_within(lambda p: 0 < p <= 1), "a number above 0 and at most 1"),
    Parameter("top_k", _int_from(-1), "an integer of at least 1, or 0 or -1 for all tokens"),
    Parameter("min_p", _float_within(lambda p: 0 <= p <= 1), "a number from 0 to 1"),
    Parameter("seed", _int_from(-1, INT64_MAX), "an integer from 0 to 2^63 - 1, or -1 for the server's own"),
    Parameter("stop", _read_stops, "a string or a list of strings, none of them empty"),
    Parameter("stop_token_ids", _read_token_ids, "a list of token ids of at least 0"),
    Parameter("ignore_eos", _read_bool, "true or false"),
    Parameter("include_stop_str_in_output", _read_bool, "true or false"),
    Parameter("skip_special_tokens", _read_bool, "true or false"),
    Parameter("num_speculative_tokens", _int_from(0), "an integer of at least 0"),
    Parameter("cache_salt", _read_text, "text"),
)

# In the contract, but served by a later version: only the values that change nothing are taken.
NEUTRAL_ONLY: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
    "logprobs": None,
}

_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def parse_sampling_params(values: Mapping[str, Any], *, max_speculative_tokens: int | None) -> SamplingParams:
    """Check `values` and give them their types.

    A value of None leaves the default. `max_speculative_tokens` bounds `num_speculative_tokens` (the server's k); None
    leaves it unbounded. Names that begin with `triton_` are skipped. Raises `ParameterError` for the first name that
    is unknown and the first value that is not allowed.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in NEUTRAL_ONLY:
            _check_neutral(name, value)
        elif name in _BY_NAME:
            if value is not None:
                parsed[name] = _BY_NAME[name].parse(value)
        elif not name.startswith(TRITON_PREFIX):
            raise ParameterError(f"unknown sampling parameter '{name}'{_nearest(name)}")
    if parsed.get("top_k") == -1:
        parsed["top_k"] = 0
    if parsed.get("seed") == -1:
        parsed["seed"] = None
    if 0 < parsed.get("temperature", 0.0) < LOWEST_TEMPERATURE:
        parsed["temperature"] = LOWEST_TEMPERATURE
    params = SamplingParams(**parsed)
    _check_together(params, max_speculative_tokens)
    return params


def _check_together(params: SamplingParams, max_speculative_tokens: int | None) -> None:
    if params.min_tokens > params.max_tokens:
        raise _not_allowed("min_tokens", params.min_tokens, f"an integer from 0 to max_tokens ({params.max_tokens})")
    k = params.num_speculative_tokens
    if k is not None and max_speculative_tokens is not None and k > max_speculative_tokens:
        allowed = f"an integer from 0 to {max_speculative_tokens}, what the server drafts"
        raise _not_allowed("num_speculative_tokens", k, allowed)


def _check_neutral(name: str, value: Any) -> None:
    neutral = NEUTRAL_ONLY[name]
    given = None if value in ("", {}, "{}", "null") else value
    if given is None or (neutral is not None and _read_float(given) == neutral):
        return
    allowed = "leave it out" if neutral is None else f"allowed: {neutral}, or leave it out"
    raise ParameterError(
        f"sampling parameter '{name}' has the value {value!r}; this version does not serve it: {allowed}"
    )


def _not_allowed(name: str, value: Any, allowed: str) -> ParameterError:
    return ParameterError(f"sampling parameter '{name}' has the value {value!r}; allowed: {allowed}")


def _nearest(name: str) -> str:
    names = [*_BY_NAME, *NEUTRAL_ONLY]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return "; the sampling parameters are: " + ", ".join(names)
