"""The server's sampling parameters, as keyword arguments that a type checker knows.

Only types: names and values go to the server as they are, and the server says which it does not take.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict


class Null(enum.Enum):
    """The type of `NULL`."""

    NULL = "null"


# JSON's null as a value: unlike None it is sent. `max_tokens=NULL` is as many as fit, where None is the server's 16.
NULL: Final = Null.NULL


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. None, like leaving a name out, means the server's default; `NULL`
    is sent as JSON's null, which `max_tokens` takes for as many as fit, and the others for their default."""

    max_tokens: int | Null | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    structured_outputs: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    prompt_logprobs: int | None
    num_speculative_tokens: int | None
    cache_salt: str | None
    lora_name: str | None
    tenant: str | None
    priority: int | None
    timeout: int | None
    # Of false, the server writes neither prompt nor answer down, whatever its setting.
    record_traffic: bool | None
    kv_transfer_params: Mapping[str, Any] | None
    # Of the prompt, the last tokens, at most this many, or the first where the side is right; -1: as many as fit.
    truncate_prompt_tokens: int | None
    truncation_side: str | None
    # Tokens that a delta of a stream waits for, but for the first and the last one.
    stream_interval: int | None
    # Not a sampling parameter: whether deltas have `steps`.
    return_steps: bool | None
    # For the chat template of `messages`.
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    enable_thinking: bool | None
    tools: Sequence[Mapping[str, Any]] | None
