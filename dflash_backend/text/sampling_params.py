"""Checks sampling parameters: one table of names, types and bounds.

Values may be text, since Triton's request parameters often are. A client may send anything: the size of a value is
checked before it is converted, and the first bad item ends the check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dflash_backend.messages import DEFAULT_PRIORITY, KVTransferParams, SamplingParams
from dflash_backend.setting_names import closest
from dflash_backend.tenant_names import TENANT_NAME, TENANT_NAME_IN_WORDS
from dflash_backend.text.client_json import TokenBiases, is_text, quoted
from dflash_backend.text.parameter_values import (
    INT64_MAX,
    float_within,
    int_from,
    read_bool,
    read_float,
    read_int,
    read_list,
    read_object,
    text_that,
    texts_within,
)
from dflash_backend.text.structured_outputs import FormatError, read_response_format, read_structured_outputs
from dflash_backend.text.vllm_parameters import OTHER_NAMES, VLLM_PARAMETERS

# vLLM's default of `max_logprobs`: each costs a message entry for every token.
MAX_LOGPROBS = 20
# Larger biases are clamped to this, as in vLLM and OpenAI's API.
MAX_LOGIT_BIAS = 100.0
# The thread that sends all responses searches each new token for stop strings.
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOGETHER = 4096
MAX_STOP_TOKEN_IDS = 1024
# In each step the tokens before are compared with each bad word.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORDS_CHARS = 8192
MAX_SALT_CHARS = 1024
MAX_HOST_CHARS = 255
MAX_PRIORITY = 2**32 - 1
# Beyond these the product with a logit of ordinary size leaves the range of float32 or loses all its digits.
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
# Below this, dividing logits by the temperature overflows float16 and gains nothing over greedy; vLLM's bound too.
LOWEST_TEMPERATURE = 1e-2
TRITON_PREFIX = "triton_"
# Parameters that `text/request.py` takes out of a request's before: they are not the engine's.
TAKEN_BEFORE = ("truncate_prompt_tokens", "truncation_side", "stream_interval")


class ParameterError(ValueError):
    """A sampling parameter is unknown or has a value that is not allowed. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter. `read` converts a value to the parameter's type, and returns None if it is not allowed;
    `allowed` describes the allowed values."""

    name: str
    read: Callable[[Any], Any]
    allowed: str

    def parse(self, value: Any) -> Any:
        """The value in the parameter's type. Raises `ParameterError`."""
        parsed = self.read(value)
        if parsed is None:
            raise _not_allowed(self.name, value, self.allowed)
        return parsed


def _read_logprobs(value: Any) -> int | None:
    """A number of log-probabilities; true is 1 and false 0, as in vLLM."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return int(value.lower() == "true")
    number = read_int(value)
    return number if number is not None and 0 <= number <= MAX_LOGPROBS else None


def _read_seed(value: Any) -> int | None:
    """Any 64-bit integer, with or without a sign. The engine's seeds have 63 bits: others count modulo 2^63."""
    number = read_int(value)
    if number is None or not -(2**63) <= number < 2**64:
        return None
    return -1 if number == -1 else number & INT64_MAX


def _read_token_ids(value: Any, most: int = MAX_STOP_TOKEN_IDS) -> tuple[int, ...] | None:
    items = read_list(value)
    if len(items) > most:
        return None
    ids: list[int] = []
    for item in items:
        token_id = read_int(item)
        if token_id is None or not 0 <= token_id <= INT64_MAX:
            return None
        ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def _read_logprob_ids(value: Any) -> tuple[int, ...] | None:
    ids = _read_token_ids(value)
    return ids if ids is not None and len(ids) <= MAX_LOGPROBS else None


def _read_allowed_ids(value: Any) -> tuple[int, ...] | None:
    """Unlike stop tokens, any number of them but none."""
    return _read_token_ids(value, most=INT64_MAX) or None


def _read_logit_bias(value: Any, vocab_size: int | None = None) -> dict[int, float] | None:
    """An object from token ids, strings in JSON, to biases, clamped to `MAX_LOGIT_BIAS`; or its JSON text.

    Raises `ParameterError` for more entries than the vocabulary has, and for the first token id past its end.
    """
    value = read_object(value)
    if value is None:
        return None
    if vocab_size is not None and len(value) > vocab_size:
        raise _not_allowed("logit_bias", value, f"at most {vocab_size} entries, one for each token")
    if isinstance(value, TokenBiases):
        return _typed_biases(value, vocab_size)
    biases: dict[int, float] = {}
    for key, given in value.items():
        token_id, bias = read_int(key), read_float(given)
        if token_id is None or not 0 <= token_id <= INT64_MAX or bias is None or token_id in biases:
            return None
        if vocab_size is not None and token_id >= vocab_size:
            raise _not_allowed("logit_bias", {key: given}, f"token ids from 0 to {vocab_size - 1}, so not {token_id}")
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return biases


def _typed_biases(value: TokenBiases, vocab_size: int | None) -> dict[int, float] | None:
    """As `_read_logit_bias`, for tens of thousands of entries at once."""
    most = INT64_MAX if vocab_size is None else vocab_size - 1
    if value and not 0 <= min(value) <= max(value) <= most:
        invalid = next(token_id for token_id in value if not 0 <= token_id <= most)
        raise _not_allowed("logit_bias", {invalid: value[invalid]}, f"token ids from 0 to {most}, so not {invalid}")
    biases = np.fromiter(value.values(), np.float64, len(value))
    return dict(zip(value, biases.clip(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS).tolist(), strict=True))


def _read_kv_transfer(value: Any) -> KVTransferParams | None:
    """An object in vLLM's form, or its JSON text; what else is in it is ignored."""
    if isinstance(value, KVTransferParams):
        return value
    value = read_object(value)
    if value is None:
        return None
    decode, prefill = (value.get(name) or False for name in ("do_remote_decode", "do_remote_prefill"))
    if not isinstance(decode, bool) or not isinstance(prefill, bool) or (decode and prefill):
        return None
    if not prefill:
        return KVTransferParams(do_remote_decode=decode)
    host, port, ids = value.get("remote_host"), read_int(value.get("remote_port")), value.get("remote_block_ids")
    count = value.get("remote_num_blocks")
    num_blocks = (len(ids) if isinstance(ids, list) else 0) if count is None else read_int(count)
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARS or not is_text(host):
        return None
    if port is None or not 0 < port < 65536 or num_blocks is None or not 0 < num_blocks <= INT64_MAX:
        return None
    return KVTransferParams(do_remote_prefill=True, remote_host=host, remote_port=port, remote_num_blocks=num_blocks)


_PENALTY = "a number from -2 to 2 (0 is none)"
_SALT = f"text of at most {MAX_SALT_CHARS} characters"
_BIAS = 'an object from token ids to finite numbers, such as {"17": -100}'

PARAMETERS: tuple[Parameter, ...] = (
    Parameter("n", int_from(1), "an integer from 1 to what the server runs at a time"),
    Parameter("max_tokens", int_from(1), "an integer from 1 to 2^63 - 1, or null for as many as fit"),
    Parameter("min_tokens", int_from(0), "an integer from 0 to max_tokens"),
    Parameter("temperature", float_within(0), "a finite number of at least 0 (0 is greedy)"),
    Parameter("top_p", float_within(math.ulp(0.0), 1), "a number above 0 and at most 1"),
    Parameter("top_k", int_from(-1), "an integer from 1 to 2^63 - 1, or 0 or -1 for all tokens"),
    Parameter("min_p", float_within(0, 1), "a number from 0 to 1"),
    Parameter("presence_penalty", float_within(-2, 2), _PENALTY),
    Parameter("frequency_penalty", float_within(-2, 2), _PENALTY),
    Parameter(
        "repetition_penalty",
        float_within(LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY),
        f"a number from {LEAST_REPETITION_PENALTY:g} to {MOST_REPETITION_PENALTY:g} (1 is none)",
    ),
    Parameter("logit_bias", _read_logit_bias, _BIAS),
    Parameter("allowed_token_ids", _read_allowed_ids, "a list of at least one token id, each of at least 0"),
    Parameter("bad_words", *texts_within(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORDS_CHARS)),
    Parameter("logprobs", _read_logprobs, f"an integer from 0 to {MAX_LOGPROBS}, not -1 for the whole vocabulary"),
    Parameter(
        "logprob_token_ids",
        _read_logprob_ids,
        f"a list of at most {MAX_LOGPROBS} token ids, whose log-probabilities come in place of the most likely ones",
    ),
    Parameter("prompt_logprobs", _read_logprobs, f"an integer from 0 to {MAX_LOGPROBS}, not -1 for the vocabulary"),
    Parameter("seed", _read_seed, "a 64-bit integer, or -1 for the server's own"),
    Parameter("stop", *texts_within(MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_CHARS_TOGETHER)),
    Parameter("stop_token_ids", _read_token_ids, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids of at least 0"),
    Parameter("ignore_eos", read_bool, "true or false"),
    Parameter("include_stop_str_in_output", read_bool, "true or false"),
    Parameter("skip_special_tokens", read_bool, "true or false"),
    Parameter("num_speculative_tokens", int_from(0), "an integer from 0 to what the server drafts"),
    Parameter("cache_salt", text_that(lambda text: len(text) <= MAX_SALT_CHARS and is_text(text)), _SALT),
    Parameter("lora_name", text_that(is_text), "the name of a LoRA adapter of the server"),
    Parameter("tenant", text_that(TENANT_NAME.fullmatch), TENANT_NAME_IN_WORDS),
    Parameter(
        "priority",
        int_from(0, MAX_PRIORITY),
        f"an integer from 1, the most urgent, to {MAX_PRIORITY}, or 0 for {DEFAULT_PRIORITY}",
    ),
    Parameter("timeout", int_from(0), "an integer of microseconds, or 0 for none"),
    Parameter("record_traffic", read_bool, "true or false"),
    Parameter(
        "kv_transfer_params",
        _read_kv_transfer,
        "an object with either do_remote_decode, or do_remote_prefill and what a prefill server has answered: "
        "remote_host, remote_port (1 to 65535) and remote_num_blocks or remote_block_ids",
    ),
)
# Both name the grammar of an answer.
FORMATS = {"structured_outputs": read_structured_outputs, "response_format": read_response_format}

_BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


# As clients of TensorRT-LLM write a list of texts that they leave out.
EMPTY_TEXTS = ("bad_words", "stop")


def parse_sampling_params(
    values: Mapping[str, Any],
    *,
    max_speculative_tokens: int | None,
    vocab_size: int | None = None,
    max_n: int | None = None,
) -> SamplingParams:
    """Check `values` and convert them to their types.

    A value of None means the default; `max_tokens` of None means as many as fit. `max_speculative_tokens` (the server's
    k) bounds `num_speculative_tokens`, `vocab_size` token ids, and `max_n` bounds `n`; None means no bound. Names that
    begin with `triton_` are skipped, and so is an empty text for a list of texts or by another server's name.
    Parameters of vLLM that this server does not have may have neutral values. Raises `ParameterError` for the first
    unknown name or value that is not allowed.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if value == "" and (name in EMPTY_TEXTS or name in OTHER_NAMES):
            continue
        if name in VLLM_PARAMETERS:
            if not VLLM_PARAMETERS[name].asks_for_nothing(value):
                raise _not_supported(name, value)
        elif name not in _BY_NAME and name not in FORMATS:
            if name != "best_of" and not name.startswith(TRITON_PREFIX):
                raise ParameterError(f"unknown sampling parameter {quoted(name)}{_nearest(name)}")
        elif value is None:
            continue
        elif name in FORMATS:
            _add_format(parsed, name, value)
        elif name == "logit_bias":
            parsed[name] = replace(_BY_NAME[name], read=partial(_read_logit_bias, vocab_size=vocab_size)).parse(value)
        else:
            parsed[name] = _BY_NAME[name].parse(value)
    if "max_tokens" in values and values["max_tokens"] is None:
        parsed["max_tokens"] = INT64_MAX
    if parsed.get("top_k") == -1:
        parsed["top_k"] = 0
    if parsed.get("seed") == -1:
        parsed["seed"] = None
    if 0 < parsed.get("temperature", 0.0) < LOWEST_TEMPERATURE:
        parsed["temperature"] = LOWEST_TEMPERATURE
    params = SamplingParams(**parsed)
    _check_together(params, max_speculative_tokens, vocab_size, max_n)
    best_of = values.get("best_of")
    if best_of is not None and read_int(best_of) not in (1, params.n):
        raise _not_allowed("best_of", best_of, f"{params.n}, the value of 'n': all answers are returned")
    return params


def child(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of completion `index` (0-based) of the `n` in `params`: one completion, and `seed + index` as its
    seed if there is one, as in vLLM. Only the first computes the prompt's log-probabilities."""
    seed = params.seed
    changes: dict[str, Any] = {"prompt_logprobs": None} if index else {}
    return msgspec.structs.replace(params, n=1, seed=None if seed is None else (seed + index) & INT64_MAX, **changes)


def _check_together(
    params: SamplingParams, max_speculative_tokens: int | None, vocab_size: int | None, max_n: int | None
) -> None:
    """Bounds that depend on the server or on another parameter."""
    if max_n is not None and params.n > max_n:
        raise _not_allowed("n", params.n, f"an integer from 1 to {max_n}, what the server runs at a time")
    if vocab_size is not None:
        ids = params.stop_token_ids
        for name, named in (
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", ids),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            invalid = next((token_id for token_id in named if token_id >= vocab_size), None)
            if invalid is not None:
                raise _not_allowed(name, named, f"token ids from 0 to {vocab_size - 1}, so not {invalid}")
        # Stop tokens are masked until min_tokens are generated: with all tokens masked, none could be sampled.
        if params.min_tokens > 0 and 2 * len(ids) > vocab_size:
            allowed = f"with min_tokens at most half of the vocabulary, {vocab_size // 2} tokens"
            raise _not_allowed("stop_token_ids", ids, allowed)
    if params.logprob_token_ids and params.logprobs is None:
        raise _not_allowed("logprob_token_ids", params.logprob_token_ids, "null without 'logprobs'")
    if params.min_tokens > params.max_tokens:
        raise _not_allowed("min_tokens", params.min_tokens, f"an integer from 0 to max_tokens ({params.max_tokens})")
    if params.structured_outputs is not None:
        # With them it might happen that no token is left.
        for name in ("allowed_token_ids", "bad_words"):
            if given := getattr(params, name):
                raise _not_allowed(name, given, "null with 'structured_outputs', whose grammar can say as much")
    k = params.num_speculative_tokens
    if k is not None and max_speculative_tokens is not None and k > max_speculative_tokens:
        allowed = f"an integer from 0 to {max_speculative_tokens}, what the server drafts"
        raise _not_allowed("num_speculative_tokens", k, allowed)


def _add_format(parsed: dict[str, Any], name: str, value: Any) -> None:
    """Add the grammar that a parameter of `FORMATS` names. Raises `ParameterError`."""
    try:
        grammar = FORMATS[name](value)
    except FormatError as error:
        raise ParameterError(f"sampling parameter '{name}' {error}") from None
    if grammar is None:
        return
    known = parsed.setdefault("structured_outputs", msgspec.structs.replace(grammar, parameter=name))
    if msgspec.structs.replace(known, parameter=grammar.parameter) != grammar:
        raise ParameterError("sampling parameters 'structured_outputs' and 'response_format' name two grammars")


def _not_allowed(name: str, value: Any, allowed: str) -> ParameterError:
    if name == "stop" and isinstance(value, int | float) and not isinstance(value, bool):
        allowed += f'; write the number as text, in JSON "{value}" with its quotes'
    return ParameterError(f"sampling parameter '{name}' has the value {quoted(value)}; allowed: {allowed}")


def _not_supported(name: str, value: Any) -> ParameterError:
    known = VLLM_PARAMETERS[name]
    neutral = " or ".join(msgspec.json.encode(word).decode() for word in (None, *known.neutral))
    return ParameterError(
        f"sampling parameter '{name}' has the value {quoted(value)}; allowed: {neutral}; {known.instead}"
    )


def _nearest(name: str) -> str:
    if name in OTHER_NAMES:
        return f"; use {OTHER_NAMES[name]}"
    return closest(name, (*_BY_NAME, *TAKEN_BEFORE), "sampling parameters", cutoff=0.6)
