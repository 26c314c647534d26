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

import msgspec

from dflash_backend.messages import SamplingParams

INT64_MAX = 2**63 - 1
# vLLM's default of `max_logprobs`: each costs the server a message entry for every token.
MAX_LOGPROBS = 20
# A larger bias is cut to this, as vLLM and OpenAI do.
MAX_LOGIT_BIAS = 100.0
# Each new token is searched for each stop string, by the thread that sends every request's responses.
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_CHARS = 1024
# Of a value that is quoted back; a client may have sent megabytes.
MAX_QUOTED_CHARS = 200
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


def _read_salt(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_SALT_CHARS and _is_text(value) else None


def _is_text(value: str) -> bool:
    """Whether a string has a UTF-8 form: half a surrogate pair has none."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_list(value: Any) -> list[Any]:
    """A list as it is, a JSON list out of a string, and anything else as the only element."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return list(json.loads(value))
        except (ValueError, RecursionError):
            return [value]
    return [value]


def _read_stops(value: Any) -> tuple[str, ...] | None:
    stops = _read_list(value)
    if len(stops) > MAX_STOPS:
        return None
    texts = [stop for stop in stops if isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS and _is_text(stop)]
    return tuple(texts) if len(texts) == len(stops) else None


def _read_token_ids(value: Any) -> tuple[int, ...] | None:
    ids = [_read_int(item) for item in _read_list(value)]
    if len(ids) > MAX_STOP_TOKEN_IDS:
        return None
    return tuple(i for i in ids if i is not None) if all(i is not None and 0 <= i <= INT64_MAX for i in ids) else None


def _read_logit_bias(value: Any) -> dict[int, float] | None:
    """An object from token ids, which JSON has as strings, to biases, cut to `MAX_LOGIT_BIAS`; or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Mapping):
        return None
    biases: dict[int, float] = {}
    for key, given in value.items():
        token_id, bias = _read_int(key), _read_float(given)
        if token_id is None or not 0 <= token_id <= INT64_MAX or bias is None:
            return None
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return biases


def _int_from(low: int, high: int = INT64_MAX) -> Callable[[Any], int | None]:
    def read(value: Any) -> int | None:
        number = _read_int(value)
        return number if number is not None and low <= number <= high else None

    return read


def _float_within(within: Callable[[float], bool]) -> Callable[[Any], float | None]:
    def read(value: Any) -> float | None:
        number = _read_float(value)
        return number if number is not None and within(number) else None

    return read


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("n", _int_from(1), "an integer of at least 1"),
    Parameter("max_tokens", _int_from(1), "an integer of at least 1"),
    Parameter("min_tokens", _int_from(0), "an integer of at least 0 and at most max_tokens"),
    Parameter("temperature", _float_within(lambda t: t >= 0), "a finite number of at least 0 (0 is greedy)"),
    Parameter("top_p", _float_within(lambda p: 0 < p <= 1), "a number above 0 and at most 1"),
    Parameter("top_k", _int_from(-1), "an integer of at least 1, or 0 or -1 for all tokens"),
    Parameter("min_p", _float_within(lambda p: 0 <= p <= 1), "a number from 0 to 1"),
    Parameter("presence_penalty", _float_within(lambda p: -2 <= p <= 2), "a number from -2 to 2 (0 is none)"),
    Parameter("frequency_penalty", _float_within(lambda p: -2 <= p <= 2), "a number from -2 to 2 (0 is none)"),
    Parameter("repetition_penalty", _float_within(lambda p: p > 0), "a finite number above 0 (1 is none)"),
    Parameter("logit_bias", _read_logit_bias, 'an object from token ids to finite numbers, such as {"17": -100}'),
    Parameter("logprobs", _int_from(0, MAX_LOGPROBS), f"an integer from 0 to {MAX_LOGPROBS}"),
    Parameter("seed", _int_from(-1, INT64_MAX), "an integer from 0 to 2^63 - 1, or -1 for the server's own"),
    Parameter(
        "stop",
        _read_stops,
        f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters",
    ),
    Parameter("stop_token_ids", _read_token_ids, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids of at least 0"),
    Parameter("ignore_eos", _read_bool, "true or false"),
    Parameter("include_stop_str_in_output", _read_bool, "true or false"),
    Parameter("skip_special_tokens", _read_bool, "true or false"),
    Parameter("num_speculative_tokens", _int_from(0), "an integer of at least 0"),
    Parameter("cache_salt", _read_salt, f"text of at most {MAX_SALT_CHARS} characters"),
)

_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def parse_sampling_params(
    values: Mapping[str, Any],
    *,
    max_speculative_tokens: int | None,
    vocab_size: int | None = None,
    max_n: int | None = None,
) -> SamplingParams:
    """Check `values` and give them their types.

    A value of None leaves the default. `max_speculative_tokens` bounds `num_speculative_tokens` (the server's k),
    `vocab_size` the token ids of `logit_bias` and `stop_token_ids`, and `max_n` bounds `n`; None leaves each of them
    unbounded. Names that begin with `triton_` are skipped. Raises `ParameterError` for the first name that is unknown
    and the first value that is not allowed.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in _BY_NAME:
            if value is not None:
                parsed[name] = _BY_NAME[name].parse(value)
        elif not name.startswith(TRITON_PREFIX):
            raise ParameterError(f"unknown sampling parameter {quoted(name)}{_nearest(name)}")
    if parsed.get("top_k") == -1:
        parsed["top_k"] = 0
    if parsed.get("seed") == -1:
        parsed["seed"] = None
    if 0 < parsed.get("temperature", 0.0) < LOWEST_TEMPERATURE:
        parsed["temperature"] = LOWEST_TEMPERATURE
    params = SamplingParams(**parsed)
    _check_together(params, max_speculative_tokens, vocab_size, max_n)
    return params


def child(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of completion `index` (0-based) of the `n` that `params` ask for: one completion, and a seed of
    its own where there is a seed, `seed + index` as in vLLM."""
    seed = params.seed
    return msgspec.structs.replace(params, n=1, seed=None if seed is None else (seed + index) & INT64_MAX)


def _check_together(
    params: SamplingParams, max_speculative_tokens: int | None, vocab_size: int | None, max_n: int | None
) -> None:
    """Bounds that depend on the server or on another parameter."""
    if max_n is not None and params.n > max_n:
        raise _not_allowed("n", params.n, f"an integer from 1 to {max_n}, what the server runs at a time")
    if vocab_size is not None:
        strange = [token_id for token_id in params.logit_bias if token_id >= vocab_size]
        if strange:
            raise _not_allowed(
                "logit_bias", params.logit_bias, f"token ids from 0 to {vocab_size - 1}, so not {strange[0]}"
            )
        strange = [token_id for token_id in params.stop_token_ids if token_id >= vocab_size]
        if strange:
            allowed = f"token ids from 0 to {vocab_size - 1}, so not {strange[0]}"
            raise _not_allowed("stop_token_ids", list(params.stop_token_ids), allowed)
    if params.min_tokens > params.max_tokens:
        raise _not_allowed("min_tokens", params.min_tokens, f"an integer from 0 to max_tokens ({params.max_tokens})")
    k = params.num_speculative_tokens
    if k is not None and max_speculative_tokens is not None and k > max_speculative_tokens:
        allowed = f"an integer from 0 to {max_speculative_tokens}, what the server drafts"
        raise _not_allowed("num_speculative_tokens", k, allowed)


def _not_allowed(name: str, value: Any, allowed: str) -> ParameterError:
    return ParameterError(f"sampling parameter '{name}' has the value {quoted(value)}; allowed: {allowed}")


def quoted(value: Any) -> str:
    """A value as an error message shows it: shortened."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}... ({len(text)} characters)"


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return "; the sampling parameters are: " + ", ".join(_BY_NAME)
