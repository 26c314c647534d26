"""Turns what a Triton request carries into a validated `ParsedRequest`. Called by `frontend.service`.

Knows no Triton type: inputs come as numpy arrays by name and request parameters as the JSON that Triton gives, so that
every refusal can be tested without a server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_backend.frontend.tokenizer import PromptError, Tokenizer
from dflash_backend.messages import EngineReady, SamplingParams
from dflash_backend.sampling_params import parse_sampling_params, quoted

Array = np.ndarray[Any, Any]

PROMPT_INPUTS = ("text_input", "input_ids", "messages")
# What Triton itself puts among the parameters of a request that came with these fields.
TRITON_PARAMETERS = frozenset({"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout"})
RETURN_FLAGS = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
    "return_cumulative_logprob",
    "return_token_ids",
    "return_spec_stats",
)
# Longer numbers are nowhere allowed, and Python reads none of thousands of digits.
MAX_DIGITS = 100
# A logit bias for every token of a large vocabulary fits.
MAX_PARAMETERS_CHARS = 4_000_000
# JSON writes some characters in six, and a message has a role and the names of its fields besides.
MESSAGES_CHARS_PER_PROMPT_CHAR = 8


class InputError(ValueError):
    """An input is malformed. The message is for the client."""


@dataclass(frozen=True, slots=True)
class ReturnFlags:
    """Which outputs were asked for."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False
    token_ids: bool = False
    spec_stats: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that can be queued. `prefix` goes before the text of each completion: the prompt, or nothing."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    stream: bool
    prefix: str
    returns: ReturnFlags


def parse_request(
    inputs: Mapping[str, Array], parameters: str, tokenizer: Tokenizer, ready: EngineReady, max_n: int
) -> ParsedRequest:
    """Check every input and parameter and tokenise the prompt.

    `inputs` are the tensors that were sent: STRING as arrays of bytes objects, BOOL, INT32 or INT64. `parameters` is
    the JSON object of the request's own parameters, or empty. `max_n` bounds the completions of one request. Raises
    `InputError`, `PromptError` or `ParameterError`, each a ValueError with a sentence for the client.
    """
    stream = _flag(inputs, "stream", False)
    exclude_input = _flag(inputs, "exclude_input_in_output", stream)
    if stream and not exclude_input:
        raise InputError("input 'exclude_input_in_output' is false and 'stream' is true; allowed with streaming: true")
    returns = ReturnFlags(**{name.removeprefix("return_"): _flag(inputs, name, False) for name in RETURN_FLAGS})
    sampling = parse_sampling_params(
        _sampling_values(inputs, parameters),
        max_speculative_tokens=ready.num_speculative_tokens,
        vocab_size=ready.vocab_size,
        max_n=max_n,
    )
    token_ids, text = _prompt(inputs, tokenizer, ready)
    if not token_ids:
        raise InputError("the prompt is empty; it must have at least one token")
    if len(token_ids) + 1 > ready.max_model_len:
        raise InputError(
            f"the prompt has {len(token_ids)} tokens and the answer needs at least 1, but max_model_len is "
            f"{ready.max_model_len}; shorten the prompt"
        )
    prefix = ""
    if not exclude_input:
        prefix = tokenizer.decode(token_ids, sampling.skip_special_tokens) if text is None else text
    return ParsedRequest(token_ids, sampling, stream, prefix, returns)


def _prompt(inputs: Mapping[str, Array], tokenizer: Tokenizer, ready: EngineReady) -> tuple[list[int], str | None]:
    """The prompt's token ids, and its text where it came as text."""
    given = [name for name in PROMPT_INPUTS if name in inputs]
    if len(given) != 1:
        sent = f"{' and '.join(given)} were sent" if given else "none was sent"
        raise InputError(f"exactly one of the inputs {', '.join(PROMPT_INPUTS)} is needed; {sent}")
    if given == ["text_input"]:
        text = _string(inputs, "text_input")
        _check_length(text, tokenizer, ready)
        return tokenizer.encode(text) if text else [], text
    if given == ["messages"]:
        most = MESSAGES_CHARS_PER_PROMPT_CHAR * ready.max_model_len * tokenizer.max_token_chars
        text = tokenizer.render_chat(_messages(_string(inputs, "messages"), most))
        _check_length(text, tokenizer, ready)
        return tokenizer.encode_chat(text), text
    return _token_ids(inputs["input_ids"], ready.vocab_size), None


def _check_length(text: str, tokenizer: Tokenizer, ready: EngineReady) -> None:
    """Refuse a text that is too long whatever its tokens are: tokenising megabytes would keep others waiting."""
    most = ready.max_model_len * tokenizer.max_token_chars
    if len(text) > most:
        raise InputError(
            f"the prompt has {len(text)} characters, but max_model_len is {ready.max_model_len} tokens, which are at "
            f"most {most} characters; shorten the prompt"
        )


def _token_ids(array: Array, vocab_size: int) -> list[int]:
    if array.dtype not in (np.int32, np.int64):
        raise InputError(f"input 'input_ids' has the type {array.dtype}; allowed: INT32 or INT64")
    token_ids: list[int] = array.reshape(-1).tolist()
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"input 'input_ids' has {token_id} at position {position}; allowed: the target's token ids, 0 to "
                f"{vocab_size - 1}"
            )
    return token_ids


def _messages(text: str, max_chars: int) -> list[dict[str, Any]]:
    messages = _load_json(text, "input 'messages'", max_chars)
    if not isinstance(messages, list) or not messages:
        raise InputError('input \'messages\' must be a JSON list such as [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"input 'messages': message {index} must be an object with a 'role' and a 'content'")
    return messages


def _sampling_values(inputs: Mapping[str, Array], parameters: str) -> dict[str, Any]:
    """The sampling parameters as they were sent: the input wins over the request's own parameters."""
    if "sampling_parameters" in inputs:
        values = _json_object(_string(inputs, "sampling_parameters"), "input 'sampling_parameters'")
    else:
        values = _json_object(parameters or "{}", "the object of request parameters")
        values = {name: value for name, value in values.items() if name not in TRITON_PARAMETERS}
    # Triton's vLLM backend takes it; a client must not think that its adapter was used.
    if values.pop("lora_name", None) is not None:
        raise InputError("sampling parameter 'lora_name': this server has no LoRA adapters; leave it out")
    return values


def _json_object(text: str, what: str) -> dict[str, Any]:
    values = _load_json(text, what, MAX_PARAMETERS_CHARS)
    if not isinstance(values, dict):
        raise InputError(f'{what} must be a JSON object, such as {{"max_tokens": 64}}')
    return values


def _load_json(text: str, what: str, max_chars: int) -> Any:
    """Parse JSON that a client wrote. Raises `InputError`, also for what Python's reader would let pass: NaN, a key
    that comes twice, and half a surrogate pair, which has no UTF-8 form."""
    if len(text) > max_chars:
        raise InputError(f"{what} has {len(text)} characters; allowed: at most {max_chars}")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_short_int)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise InputError(f"{what} is nested too deeply") from None
    except UnicodeEncodeError:
        raise InputError(f"{what} has half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except ValueError as error:
        raise InputError(f"{what} is not JSON: {error}") from None
    return value


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


def _string(inputs: Mapping[str, Array], name: str) -> str:
    value = _one(inputs[name], name)
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InputError(f"input '{name}' has the type {inputs[name].dtype}; allowed: STRING")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _flag(inputs: Mapping[str, Array], name: str, default: bool) -> bool:
    if name not in inputs:
        return default
    if inputs[name].dtype != np.bool_:
        raise InputError(f"input '{name}' has the type {inputs[name].dtype}; allowed: BOOL")
    return bool(_one(inputs[name], name))


def _one(array: Array, name: str) -> Any:
    if array.size != 1:
        raise InputError(f"input '{name}' has {array.size} elements; it must have 1")
    return array.reshape(-1)[0]


__all__ = ["InputError", "ParsedRequest", "PromptError", "ReturnFlags", "parse_request"]
