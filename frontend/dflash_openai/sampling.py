"""From the parameters of OpenAI and vLLM to those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dflash_backend.text.client_json import quoted
from dflash_backend.text.truncation import COUNT, SIDE, SIDES, Truncation, allowed_counts, is_allowed
from dflash_backend.text.vllm_parameters import VLLM_PARAMETERS
from dflash_openai.errors import invalid
from dflash_openai.schemas import ChatRequest, CompletionRequest, GenerationFields
from dflash_openai.triton_pool import ModelDescription

# The model knows these by the same names, some only to refuse them with an alternative.
SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs"),
    *("cache_salt", "tenant", "priority", "num_speculative_tokens", "best_of", "use_beam_search", "length_penalty"),
    *("logprob_token_ids", "return_steps", "stream_interval", "record_traffic"),
)
# vLLM's older names of structured output.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# The default of OpenAI's completions.
COMPLETION_TOKENS = 16


def sampling_parameters(request: GenerationFields, description: ModelDescription) -> dict[str, Any]:
    """The model's sampling parameters, but for the number of tokens. Raises `ApiError`."""
    _refuse_unsupported(request)
    sampling = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    if isinstance(stop := sampling.get("stop"), str) and stop:
        sampling["stop"] = [stop]  # the model would read one that is a JSON list as such
    _check_sizes(sampling, description.vocab_size)
    sampling |= _structured_outputs(request)
    if request.model in description.lora_names:
        sampling["lora_name"] = request.model
    if request.store:
        raise invalid("'store' is true, but this server keeps no answers; leave it out or set it to false", "store")
    if request.store is False:
        sampling["record_traffic"] = False
    if isinstance(request, ChatRequest) and request.echo:
        raise invalid(
            "'echo' is true, but a chat's answer repeats no message; leave it out. With 'continue_final_message' the "
            "answer goes on from the last message",
            "echo",
        )
    if isinstance(request, ChatRequest) and request.modalities and "text" not in request.modalities:
        raise invalid("'modalities' is without 'text'; this server answers with text, so leave it out", "modalities")
    if request.stream_options is not None and not request.stream:
        raise invalid(
            "'stream_options' are only for streams; set 'stream' to true, or leave them out", "stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("'prompt_logprobs' cannot be streamed; leave 'stream' out", "prompt_logprobs")
    # Others than the prompt's own ids, which are its text.
    kv = {name: value for name, value in (request.kv_transfer_params or {}).items() if name != "prompt_token_ids"}
    if kv:
        sampling["kv_transfer_params"] = kv
    if (logprobs := _logprobs(request)) is not None:
        sampling["logprobs"] = logprobs
    return sampling


def _refuse_unsupported(request: GenerationFields) -> None:
    """Raise `ApiError` for a parameter of vLLM that the model does not have, unless its value asks for nothing."""
    for name, known in VLLM_PARAMETERS.items():
        value = None if name in SAME_NAMES else getattr(request, name)
        if value is not None and not known.asks_for_nothing(value):
            neutral = " or ".join(msgspec.json.encode(word).decode() for word in (None, *known.neutral))
            raise invalid(f"'{name}' has the value {quoted(value)}; allowed: {neutral}; {known.instead}", name)


def _check_sizes(sampling: Mapping[str, Any], vocab_size: int) -> None:
    """Raise `ApiError` for a list or an object that the model would refuse for its size: other requests wait while it
    is written for the model."""
    for name, value in sampling.items():
        if isinstance(value, list | dict) and len(value) > vocab_size:
            raise invalid(f"'{name}' has {len(value)} items; allowed: at most {vocab_size}, one for each token", name)


def _structured_outputs(request: GenerationFields) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.response_format is not None and request.response_format.get("type") != "text":
        given["response_format"] = request.response_format
    if request.structured_outputs is not None:
        given["structured_outputs"] = request.structured_outputs
    for name, key in GUIDED.items():
        if (value := getattr(request, name)) is not None:
            given[name] = {key: value}
    if len(given) > 1:
        raise invalid(f"{' and '.join(given)} were sent; only one of them can hold", next(iter(given)))
    return {("response_format" if name == "response_format" else "structured_outputs"): v for name, v in given.items()}


def client_names(request: GenerationFields) -> dict[str, str]:
    """What this client calls a parameter of the model, where it is not the same: the model's name -> the client's."""
    # A chat's `logprobs` is whether there are any, and `top_logprobs` their number.
    names = {"logprobs": "top_logprobs"} if isinstance(request, ChatRequest) else {}
    guided = next((name for name in GUIDED if getattr(request, name) is not None), None)
    return names if guided is None else {**names, "structured_outputs": guided}


def _logprobs(request: GenerationFields) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def truncation(request: GenerationFields, max_model_len: int) -> Truncation | None:
    """How a prompt is made shorter; None where it is not. Raises `ApiError`."""
    count, side = request.truncate_prompt_tokens, request.truncation_side
    if side is not None and side not in SIDES:
        raise invalid(f"'{SIDE}' is {quoted(side)}; allowed: left, which keeps the end, or right", SIDE)
    if count is None:
        return None
    if not is_allowed(count, max_model_len):
        raise invalid(f"'{COUNT}' is {count}; allowed: {allowed_counts(max_model_len)}", COUNT)
    asked = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    asked = request.max_tokens if asked is None else asked
    return Truncation.that_fits(count, side, max_model_len, asked)


def max_tokens(
    request: GenerationFields, num_prompt_tokens: int, description: ModelDescription, names: Mapping[str, str]
) -> int:
    """The most tokens of the answer to a prompt: what the request says, else the model's default, else 16 for a
    completion and as many as fit for a chat. Never more than fit. `names` has what the client calls a chat's
    `max_completion_tokens`, where it is not the same. Raises `ApiError`."""
    fits = description.max_model_len - num_prompt_tokens
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        param = "max_completion_tokens"
        asked, param = request.max_completion_tokens, names.get(param, param)
    if asked is None:
        asked = description.sampling_defaults.get("max_tokens")
    if asked is None:
        asked = fits if isinstance(request, ChatRequest) else COMPLETION_TOKENS
    if asked < 1:
        raise invalid(f"'{param}' is {asked}; allowed: an integer of at least 1", param)
    return min(asked, fits)
