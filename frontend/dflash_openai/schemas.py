"""Bodies of requests: the fields of OpenAI's API, and vLLM's extra ones by its names.

Only types are checked here. Bounds of sampling parameters are the model's to check. A field that is null counts as left
out; one that is not here is refused by name.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Literal, TypeVar

import msgspec

from dflash_openai.errors import ApiError, invalid

# A body has at most this many brackets before it is decoded: each costs memory many times its size, and time in which
# no other request is answered. As many as a grammar may have.
MAX_BRACKETS = 50_000
# Fields of OpenAI's API that are not here, and what to do.
INSTEAD = {
    "functions": "send them as 'tools'",
    "function_call": "send 'tool_choice'",
    "web_search_options": "this server searches nothing; leave it out, or give the model a tool that does",
    "audio": "this server has no audio; leave it out",
    "moderation": "this server moderates nothing; leave it out",
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")


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
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    # Taken, without effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class GenerationFields(SharedFields, kw_only=True):
    """What chat and completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
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
    # Refused where it is true.
    store: bool | None = None
    # Taken, without effect.
    request_id: str | None = None


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
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None
    # Taken, without effect.
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Body]) -> Body:
    """The request in a body. Raises `ApiError` that names the field."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise invalid(f"the body has more than {MAX_BRACKETS} brackets")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 text: {error.reason} at byte {_first_bad_byte(body)}") from None


def _first_bad_byte(body: bytes) -> int:
    """Where a body stops being UTF-8. What msgspec says counts from the string that the byte is in."""
    try:
        return len(body.decode())
    except UnicodeDecodeError as error:
        return error.start


def _explained(message: str, kind: type[msgspec.Struct]) -> ApiError:
    if found := _UNKNOWN.match(message):
        name, where = found[1], (found[2] or "").lstrip(".")
        fields = [] if where else [field.name for field in msgspec.structs.fields(kind)]
        close = difflib.get_close_matches(name[:64], fields, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        if not where and name in INSTEAD:
            hint = f"; {INSTEAD[name]}"
        return invalid(f"unknown field '{name[:64]}'{f' in {where}' if where else ''}{hint}", name[:64])
    if found := _MISSING.match(message):
        return invalid(f"the field '{found[1]}' is missing", found[1])
    found = _WRONG.match(message)
    assert found
    if not found[2]:
        return invalid(f"the body is wrong: {found[1]}")
    return invalid(f"the field '{found[2]}' is wrong: {found[1]}", found[2])
