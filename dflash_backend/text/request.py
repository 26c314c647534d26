"""Turns the inputs and parameters of a request into a validated `ParsedRequest`.

It knows no Triton type: inputs are numpy arrays by name, request parameters are JSON text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from dflash_backend.error_text import shown
from dflash_backend.messages import EngineReady, SamplingParams
from dflash_backend.text.chat import OPTION_NAMES, PromptError, pop_options
from dflash_backend.text.client_json import BIAS_CHARS, JsonError, read_json, read_parameters
from dflash_backend.text.parameter_values import INT64_MAX, int_from
from dflash_backend.text.prompt_size import (
    MAX_MESSAGES_CHARS,
    MESSAGES_CHARS_PER_TOKEN,
    check_fits,
    check_num_tokens,
    most_chars,
    too_long,
)
from dflash_backend.text.sampling_params import Parameter, parse_sampling_params
from dflash_backend.text.structured_outputs import MAX_FORMAT_CHARS, names_format, take_formats
from dflash_backend.text.token_masks import resolve_token_masks
from dflash_backend.text.tokenizer import InputError, Tokenizer
from dflash_backend.text.truncation import Truncation, take_truncation

Array = np.ndarray[Any, Any]

PROMPT_INPUTS = ("text_input", "input_ids", "messages")
# Triton adds these fields of a request to its parameters.
TRITON_PARAMETERS = frozenset({"id", "sequence_id", "sequence_start", "sequence_end"})
DELTA_STREAM = "delta_stream"
FEWEST_NAME_CHARS, MOST_NAME_CHARS, MAX_DELTA_STREAM_CHARS = 16, 64, 128
# Sampling parameters are small, but a logit bias for every token of the vocabulary fits.
MAX_PARAMETERS_CHARS = 65_536
MAX_PARAMETERS_BRACKETS = 5000
# Of brackets and of commas outside of strings. A message has two or three of each, and six tokens at least.
MAX_MESSAGES_PARTS = 5000
TOKENS_OF_PART = 4
MAX_MESSAGES_QUOTES = 20_000
MESSAGES_QUOTES_PER_TOKEN = 4
# A role and content, and the tokens between messages.
MIN_TOKENS_OF_MESSAGE = 2
# A character has at most four bytes in UTF-8.
BYTES_PER_CHAR = 4
# Inputs of Triton's vLLM backend that this model declares only to refuse them by name.
REFUSED_INPUTS = {
    "image": "is not supported: this server has no model that reads images; leave it out",
    "embedding_request": "is not supported: this server generates text and has no embeddings; leave it out",
}
STREAM_INTERVAL = Parameter("stream_interval", int_from(1), "an integer from 1 on")
# As Triton's vLLM backend words them: its clients compare the whole text.
STREAM_WITH_PROMPT = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
NO_LORA = "LoRA feature is not enabled."
VERBATIM_ERRORS = frozenset((STREAM_WITH_PROMPT, NO_LORA))


@dataclass(frozen=True, slots=True)
class ReturnFlags:
    """Which outputs were asked for, each by the input of its name behind `return_`."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False
    token_ids: bool = False
    spec_stats: bool = False
    steps: bool = False
    stop_reason: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that can be queued. `prefix` goes before the text of each completion: the prompt, or nothing.
    `stream_interval`: tokens of a completion that one response of a stream waits for, as vLLM's parameter.
    `may_wait`: a response may wait longer where more would leave than may, since the request has not said an interval.
    `delta_stream`: the stream that may carry its deltas, and the request's key there."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    stream: bool
    prefix: str
    returns: ReturnFlags
    stream_interval: int = 1
    may_wait: bool = False
    delta_stream: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The server's rules for requests: at most `max_n` completions; a cache salt with `require_cache_salt`;
    `stream_interval` and `sampling_defaults` for what a request leaves out."""

    max_n: int
    require_cache_salt: bool = False
    stream_interval: int = 1
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


def parse_request(
    inputs: Mapping[str, Array],
    parameters: str,
    tokenizer: Tokenizer,
    ready: EngineReady,
    rules: RequestRules,
    check_queue: Callable[[SamplingParams], None] = lambda sampling: None,
) -> ParsedRequest:
    """Check every input and parameter, and tokenise the prompt.

    inputs: the tensors by name; STRING as arrays of bytes objects, BOOL, INT32 or INT64. parameters: the JSON object of
    the request's own parameters, or empty. check_queue: called before the prompt is read; it may raise. Raises
    `InputError`, `PromptError` or `ParameterError`, each a ValueError with a sentence for the client.
    """
    stream = _flag(inputs, "stream", False)
    exclude_input = _flag(inputs, "exclude_input_in_output", stream)
    if stream and not exclude_input:
        raise InputError(STREAM_WITH_PROMPT)
    for name in REFUSED_INPUTS:
        if name in inputs:
            raise InputError(f"input '{name}' {REFUSED_INPUTS[name]}")
    returns = ReturnFlags(**{each.name: _flag(inputs, f"return_{each.name}", False) for each in fields(ReturnFlags)})
    values = _sampling_values(inputs, parameters, ready)
    chat_options, kept = pop_options(values), take_truncation(values, ready.max_model_len)
    asked = values.pop(STREAM_INTERVAL.name, None)
    interval = rules.stream_interval if asked is None else STREAM_INTERVAL.parse(asked)
    # Null replaces no default, except that for `max_tokens` it means "as many as fit".
    given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
    sampling = parse_sampling_params(
        {**rules.sampling_defaults, **given},
        max_speculative_tokens=ready.num_speculative_tokens,
        vocab_size=ready.vocab_size,
        max_n=rules.max_n,
    )
    check_adapter(sampling.lora_name, ready)
    sampling = resolve_token_masks(sampling, tokenizer, tokenizer.eos_token_ids, ready.vocab_size)
    if rules.require_cache_salt and not sampling.cache_salt:
        raise InputError("the sampling parameter 'cache_salt' is missing; this server requires one of each request")
    check_queue(sampling)
    token_ids, text = _prompt(inputs, tokenizer, ready, chat_options, kept)
    if not token_ids:
        raise InputError("the prompt is empty; it must have at least one token")
    check_known(token_ids, ready)
    check_num_tokens(len(token_ids), ready.max_model_len)
    if sampling.max_tokens == INT64_MAX:
        # null, which asks for as many as fit.
        sampling = msgspec.structs.replace(sampling, max_tokens=ready.max_model_len - len(token_ids))
    prefix = ""
    if not exclude_input:
        prefix = tokenizer.decode(token_ids, sampling.skip_special_tokens) if text is None else text
    deltas = _delta_stream(inputs) if DELTA_STREAM in inputs else None
    # The batches of a delta stream have no more than text, token ids and steps.
    has_logprobs = returns.logprobs or returns.cumulative_logprob or sampling.prompt_logprobs is not None
    if asked is not None or sampling.n > 1 or has_logprobs:
        deltas = None
    return ParsedRequest(token_ids, sampling, stream, prefix, returns, interval, asked is None, deltas)


def check_adapter(lora_name: str, ready: EngineReady) -> None:
    """Raises `InputError` for a LoRA adapter that the engine does not have, in the words of Triton's vLLM backend."""
    if lora_name and not ready.lora_names:
        raise InputError(NO_LORA)
    if lora_name and lora_name not in ready.lora_names:
        raise InputError(f"LoRA {shown(lora_name)} is not supported, we currently support {list(ready.lora_names)}")


def check_known(token_ids: Sequence[int], ready: EngineReady) -> None:
    """Raises `InputError` for a token that the tokenizer has and the target has not: such as one that was added to the
    tokenizer alone."""
    if max(token_ids) >= ready.vocab_size:
        unknown = next(token_id for token_id in token_ids if token_id >= ready.vocab_size)
        raise InputError(
            f"the prompt has the token {unknown} of the tokenizer, which the target does not know: its vocabulary ends "
            f"at {ready.vocab_size - 1}; leave out the text that stands for it, such as an added special token"
        )


def _delta_stream(inputs: Mapping[str, Array]) -> tuple[str, str]:
    """The stream that a request names, and its key there."""
    name, slash, key = _string(inputs, DELTA_STREAM, MAX_DELTA_STREAM_CHARS).partition("/")
    if not slash or not key:
        raise InputError(
            f"input '{DELTA_STREAM}' of a request with a prompt is a stream's name, '/' and the request's key there; "
            f"it has no {'key' if slash else chr(39) + '/' + chr(39)}"
        )
    return delta_stream_name(name), key


def delta_stream_name(name: str) -> str:
    """The name of a delta stream. Raises `InputError` for one that others could guess."""
    if not FEWEST_NAME_CHARS <= len(name) <= MOST_NAME_CHARS:
        raise InputError(
            f"input '{DELTA_STREAM}' names a stream by {len(name)} characters; allowed: {FEWEST_NAME_CHARS} to "
            f"{MOST_NAME_CHARS}, drawn by chance: who knows a name could read along"
        )
    return name


def _prompt(
    inputs: Mapping[str, Array],
    tokenizer: Tokenizer,
    ready: EngineReady,
    chat_options: Mapping[str, Any],
    kept: Truncation | None,
) -> tuple[list[int], str | None]:
    """The prompt's token ids, of which `kept` says what remains, and its text where it came as text and is whole."""
    given = [name for name in PROMPT_INPUTS if name in inputs]
    if len(given) != 1:
        sent = f"{' and '.join(given)} were sent" if given else "none was sent"
        raise InputError(f"exactly one of the inputs {', '.join(PROMPT_INPUTS)} is needed; {sent}")
    if given == ["messages"]:
        chat = tokenizer.render_chat(_messages(inputs, ready, kept is not None), **chat_options)
        check_fits(chat.text, tokenizer, ready.max_model_len, kept)
        return _truncated(tokenizer.encode_chat(chat), chat.text, kept)
    if chat_options:
        name = next((name for name in ("tools", "continue_final_message") if name in chat_options), OPTION_NAMES[0])
        raise InputError(f"parameter '{name}' is for the chat template of the input 'messages'")
    if given == ["text_input"]:
        text = _prompt_text(inputs, tokenizer, ready)
        check_fits(text, tokenizer, ready.max_model_len, kept)
        return _truncated(tokenizer.encode(text) if text else [], text, kept)
    return _token_ids(inputs["input_ids"], ready, kept), None


def _truncated(token_ids: list[int], text: str, kept: Truncation | None) -> tuple[list[int], str | None]:
    """What remains of a prompt, and its text where that is all."""
    if kept is None or len(token_ids) <= kept.num_tokens:
        return token_ids, text
    return kept.of(token_ids), None


def _prompt_text(inputs: Mapping[str, Array], tokenizer: Tokenizer, ready: EngineReady) -> str:
    value = _one(inputs["text_input"], "text_input")
    if isinstance(value, bytes) and len(value) > BYTES_PER_CHAR * most_chars(tokenizer, ready.max_model_len):
        raise too_long(f"{len(value)} bytes", tokenizer, ready.max_model_len)
    return _string(inputs, "text_input", len(value) if isinstance(value, bytes) else 0)


def _token_ids(array: Array, ready: EngineReady, kept: Truncation | None) -> list[int]:
    if array.dtype not in (np.int32, np.int64):
        raise InputError(f"input 'input_ids' has the type {array.dtype}; allowed: INT32 or INT64")
    ids = array.reshape(-1)
    if kept is not None:
        ids = kept.of(ids)
    check_num_tokens(ids.size, ready.max_model_len)
    out_of_range = np.flatnonzero((ids < 0) | (ids >= ready.vocab_size))
    if out_of_range.size:
        position = int(out_of_range[0])
        raise InputError(
            f"input 'input_ids' has {ids[position]} at position {position}; allowed: the target's token ids, 0 to "
            f"{ready.vocab_size - 1}"
        )
    token_ids: list[int] = ids.tolist()
    return token_ids


def _messages(inputs: Mapping[str, Array], ready: EngineReady, is_truncated: bool) -> list[dict[str, Any]]:
    """The chat messages. All their content costs tokens, so `max_model_len` bounds their size, and where the prompt is
    not made shorter their number."""
    max_chars = MAX_MESSAGES_CHARS + MESSAGES_CHARS_PER_TOKEN * ready.max_model_len
    text = _string(inputs, "messages", BYTES_PER_CHAR * max_chars)
    quotes, max_quotes = text.count('"'), MAX_MESSAGES_QUOTES + MESSAGES_QUOTES_PER_TOKEN * ready.max_model_len
    if quotes > max_quotes:
        raise InputError(f"input 'messages' has too many parts: {quotes} quotation marks; allowed: {max_quotes}")
    max_parts = MAX_MESSAGES_PARTS + ready.max_model_len // TOKENS_OF_PART
    try:
        messages = read_json(text, max_chars=max_chars, max_brackets=max_parts, max_commas=max_parts)
    except JsonError as error:
        raise InputError(f"input 'messages' {error}") from None
    if not isinstance(messages, list) or not messages:
        raise InputError('input \'messages\' must be a JSON list such as [{"role": "user", "content": "Hello"}]')
    if not is_truncated and MIN_TOKENS_OF_MESSAGE * len(messages) > ready.max_model_len:
        raise InputError(
            f"input 'messages' has {len(messages)} messages, which are too many tokens: max_model_len is "
            f"{ready.max_model_len}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"input 'messages': message {index} must be an object with a 'role' and a 'content'")
    return messages


def _sampling_values(inputs: Mapping[str, Array], parameters: str, ready: EngineReady) -> dict[str, Any]:
    """The sampling parameters that were sent: those of the input, or else the request's own parameters."""
    what, given = "the object of request parameters", parameters or "{}"
    if "sampling_parameters" in inputs:
        what, given = "input 'sampling_parameters'", _one(inputs["sampling_parameters"], "sampling_parameters")
    max_chars = MAX_PARAMETERS_CHARS + BIAS_CHARS * ready.vocab_size
    if isinstance(given, str | bytes) and names_format(given):
        max_chars += MAX_FORMAT_CHARS
    text = _text(given, what, BYTES_PER_CHAR * max_chars)
    if len(text) > max_chars:
        raise InputError(f"{what} has {len(text)} characters; allowed: at most {max_chars}")
    try:
        formats, text = take_formats(text)
        values = read_parameters(
            text,
            max_chars=MAX_PARAMETERS_CHARS,
            max_biases=ready.vocab_size,
            max_brackets=MAX_PARAMETERS_BRACKETS,
        )
    except JsonError as error:
        raise InputError(f"{what} {error}") from None
    if not isinstance(values, dict):
        raise InputError(f'{what} must be a JSON object, such as {{"max_tokens": 64}}')
    if "sampling_parameters" not in inputs:
        values = {name: value for name, value in values.items() if name not in TRITON_PARAMETERS}
    values |= formats
    return values


def _string(inputs: Mapping[str, Array], name: str, max_bytes: int) -> str:
    """The text of an input."""
    return _text(_one(inputs[name], name), f"input '{name}'", max_bytes)


def _text(value: Any, what: str, max_bytes: int) -> str:
    """A text, or that of bytes, which are measured before they are decoded. `what` it is of, in words."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InputError(f"{what} has the type {np.asarray(value).dtype}; allowed: STRING")
    if len(value) > max_bytes:
        raise InputError(f"{what} has {len(value)} bytes; allowed: at most {max_bytes}")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None


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


__all__ = [
    "InputError",
    "ParsedRequest",
    "PromptError",
    "RequestRules",
    "ReturnFlags",
    "check_adapter",
    "check_known",
    "parse_request",
]
