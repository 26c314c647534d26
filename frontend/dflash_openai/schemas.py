"""Bodies of requests: the fields of OpenAI's API, and vLLM's extra ones by its names.

Only types are checked here. Bounds of sampling parameters are the model's to check. A field that is null counts as left
out; one that is not here is ignored with a line in the log, or refused by name. A whole number may be written as 4.0,
as clients do whose language has one kind of numbers, and a boolean as 1 or 0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dflash_backend.text.client_json import quoted
from dflash_backend.text.parameter_values import whole_number
from dflash_backend.text.vllm_parameters import OTHER_NAMES
from dflash_openai.errors import ApiError, invalid
from dflash_openai.notices import log_once_of_client

# A body has at most this many brackets before it is decoded: each costs memory many times its size, and time in which
# no other request is answered. As many as a grammar may have.
MAX_BRACKETS = 50_000
MAX_NAME_CHARS = 1000
# Fields that are not here and without which the answer would be another one: they are refused, with what to do.
INSTEAD = {
    "functions": "send them as 'tools'",
    "function_call": "send 'tool_choice'",
    "thinking": "send 'enable_thinking'",
}
# Fields of the endpoints that say the same: what a client sends to one endpoint, it may have learnt from another.
ALIKE = (
    ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "max_length", "num_predict"),
    ("messages", "input", "prompt"),
    ("instructions", "system"),
    ("response_format", "text", "output_config"),
    ("reasoning_effort", "reasoning", "output_config"),
    ("stop", "stop_sequences"),
)
# Of one request, this many fields that are not here are told of in the log.
MAX_TOLD = 8
_UNKNOWN = "Object contains unknown field"
_WRONG = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")
# What msgspec says of a number in place of an integer or a boolean.
_OTHER_NUMBER = re.compile(r"^Expected `[^`]*\b(?:int|bool)\b[^`]*`, got `(?:float|int)`")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's and vLLM's options of a stream. `include_obfuscation` is taken and has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all requests that generate text have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Sampling parameters of OpenAI.
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    # Those of vLLM, and ours.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    # In place of the likeliest, where log-probabilities are asked for.
    logprob_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    # Of false, the server writes neither prompt nor answer down, whatever its setting.
    record_traffic: bool | None = None
    # Taken, without effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    request_id: str | None = None
    # vLLM's clients send it so that a router finds the server that has their prefix.
    session_id: str | None = None
    # Tokens that a part of a stream waits for.
    stream_interval: int | None = None
    # Parameters of vLLM that this server has not: refused with what to do, unless they ask for nothing.
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    flat_logprobs: Any = None
    detokenize: Any = None
    output_kind: Any = None
    skip_clone: Any = None
    output_text_buffer_length: Any = None
    guided_decoding: Any = None
    extra_args: Any = None
    skip_reading_prefix_cache: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    trace_decode_token_ids: Any = None
    early_stopping: Any = None
    logits_processors: Any = None


class GenerationFields(SharedFields, kw_only=True):
    """What chat and completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    # Of the prompt, this many tokens at most; -1: as many as fit. They are the last unless `truncation_side` is right.
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    tenant: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_steps: bool | None = None
    # Between a prefill and a decode server. A chat's may bring the prompt's token ids in place of the messages.
    kv_transfer_params: dict[str, Any] | None = None
    # Refused where it is true; of false as `record_traffic`.
    store: bool | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions. `messages` are checked where they are turned into a prompt."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # Any word: one that the chat template does not know is the template's to refuse.
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Refused where it is true.
    echo: bool | None = None
    # Refused without "text".
    modalities: list[str] | None = None
    # Taken, without effect.
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Body], reject_unknown: bool = False) -> Body:
    """The request in a body. Fields that `kind` has not are ignored with a line in the log; with `reject_unknown` they
    are errors, unless they are null. Raises `ApiError` that names the field."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise invalid(f"the body has more than {MAX_BRACKETS} brackets")
    if not body.strip():
        raise invalid("the body is empty; allowed: a JSON object")
    try:
        try:
            return _decoded(body, kind)
        except msgspec.ValidationError as error:
            if not str(error).startswith(_UNKNOWN):
                raise
        return _decoded(_without_unknown(body, kind, reject_unknown), kind)
    except msgspec.ValidationError as error:
        raise _explained(_shortened(str(error))) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 text: {error.reason} at byte {_first_bad_byte(body)}") from None


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not _OTHER_NUMBER.match(str(error)):
            raise
    return msgspec.convert(_with_whole_numbers(msgspec.json.decode(body), kind), kind)


def text_in(value: Any, name: str) -> str | None:
    """A field, if it is there, of an object that is decoded as it is. Raises `ApiError` unless it is a text."""
    if value is not None and not isinstance(value, str):
        raise invalid(f"'{name}' is wrong: {quoted(value)} is no text", name)
    return value


def _without_unknown(body: bytes, kind: type[msgspec.Struct], reject: bool, where: str = "") -> bytes:
    """A body without the fields that `kind` has not, and its objects without those that theirs have not. Raises
    `ApiError` for one that is refused."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    unknown = [name for name in given.keys() - fields.keys() if bytes(given[name]) != b"null"]
    for name in unknown if reject else [name for name in unknown if not where and name in INSTEAD]:
        raise invalid(f"unknown field '{name[:64]}'{where}{_hint(name, where, fields)}", name[:64])
    for name in unknown[:MAX_TOLD]:
        _tell(name[:64], where, fields)
    kept = {name: raw for name, raw in given.items() if name in fields}
    for name, raw in kept.items():
        inner = next((each for each in get_args(fields[name]) if isinstance(each, type(msgspec.Struct))), None)
        if inner is not None and bytes(raw).startswith(b"{"):
            kept[name] = msgspec.Raw(_without_unknown(bytes(raw), inner, reject, f" in {name}"))
    return msgspec.json.encode(kept)


def _tell(name: str, where: str, fields: Mapping[str, Any]) -> None:
    log_once_of_client(
        f"field {name}{where}", lambda: f"the field {quoted(name)}{where} is ignored{_hint(name, where, fields)}"
    )


def _hint(name: str, where: str, fields: Mapping[str, Any]) -> str:
    """What to send in place of a field, where that is known."""
    if where:
        return ""
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    for names in ALIKE:
        if name in names and (meant := next((each for each in names if each in fields), None)):
            return f"; use '{meant}'"
    if close := difflib.get_close_matches(name[:64], fields, n=1):
        return f"; did you mean '{close[0]}'?"
    return f"; use {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""


def _with_whole_numbers(body: Any, kind: type[msgspec.Struct]) -> Any:
    """A decoded body in which whole numbers are integers where the fields of `kind` want those, and 1 and 0 booleans
    where they want these. What is no such number stays as it is, and is refused by the name of its field."""
    if not isinstance(body, dict):
        return body
    readers = _number_fields(kind)
    return {name: readers[name](value) if name in readers else value for name, value in body.items()}


@lru_cache
def _number_fields(kind: type[msgspec.Struct]) -> dict[str, Callable[[Any], Any]]:
    """For each field of integers or booleans, what reads its value."""
    readers: dict[str, Callable[[Any], Any]] = {}
    for name, hint in get_type_hints(kind).items():
        for each in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
            if each is int:
                readers[name] = whole_number
            elif each is bool:
                readers[name] = _boolean
            elif get_origin(each) is list and get_args(each) == (int,):
                readers[name] = _whole_numbers
            elif isinstance(each, type) and issubclass(each, msgspec.Struct):
                readers[name] = partial(_with_whole_numbers, kind=each)
    return readers


def _boolean(value: Any) -> Any:
    return bool(value) if type(value) in (int, float) and value in (0, 1) else value


def _whole_numbers(value: Any) -> Any:
    return list(map(whole_number, value)) if isinstance(value, list) else value


def _first_bad_byte(body: bytes) -> int:
    """Where a body stops being UTF-8. What msgspec says counts from the string that the byte is in."""
    try:
        return len(body.decode())
    except UnicodeDecodeError as error:
        return error.start


def _shortened(message: str) -> str:
    """Without the middle of a name that a client made megabytes long: looking for its end takes long."""
    return message if len(message) <= 2 * MAX_NAME_CHARS else message[:MAX_NAME_CHARS] + message[-MAX_NAME_CHARS:]


def _explained(message: str) -> ApiError:
    if found := _MISSING.match(message):
        return invalid(f"the field '{found[1]}' is missing", found[1])
    found = _WRONG.match(message)
    assert found
    if not found[2]:
        return invalid(f"the body is wrong: {found[1]}")
    return invalid(f"the field '{found[2]}' is wrong: {found[1]}", found[2])
