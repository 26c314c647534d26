"""What passes between NVIDIA Dynamo and our client: its requests as sampling parameters, our deltas as its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_client import Delta

# Of `sampling_options` and `stop_conditions`, those that go on. Dynamo looks for stop strings itself.
_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_STOPS = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
_GUIDES = ("json", "regex", "choice", "grammar")
# What Dynamo calls the ends.
_FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled"}


def sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a Dynamo request. Raises `ValueError` for what the server cannot do."""
    options, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    if (options.get("n") or 1) > 1:
        raise ValueError("n is above 1: ask for one answer at a time through Dynamo")
    output = request.get("output_options") or {}
    if output.get("logprobs") is not None or output.get("prompt_logprobs") is not None:
        raise ValueError("log-probabilities do not come through Dynamo: leave logprobs out, or ask the server itself")
    found = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    if found.get("top_k", 0) < 0:
        del found["top_k"]
    found |= {name: stops[name] for name in _STOPS if stops.get(name) is not None}
    guide = options.get("guided_decoding") or {}
    guide = {name: value for name, value in guide.items() if value is not None}
    formats = {name: guide[name] for name in _GUIDES if name in guide}
    if formats:
        found["structured_outputs"] = formats
    elif guide:
        raise ValueError(f"guided decoding has {', '.join(sorted(guide))}; allowed: {', '.join(_GUIDES)}")
    return found


def chunk(delta: Delta, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    """A chunk of an answer; the last one has its usage."""
    made: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": 0}
    if delta.finish_reason is not None:
        made["finish_reason"] = _FINISHED.get(delta.finish_reason, delta.finish_reason)
        made["completion_usage"] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }
        cached = (delta.spec_stats or {}).get("num_cached_tokens")
        if cached is not None:
            made["completion_usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
    return made


def event_sources(description: Mapping[str, Any], addresses: list[str]) -> list[tuple[str, str, int]]:
    """Address, topic and number of each engine that publishes. `addresses`: where they are reached from here; empty:
    at what the server says of itself."""
    published = addresses or description["kv_events_endpoints"]
    return [
        (address.replace("*", "127.0.0.1"), description["kv_events_topic"], i) for i, address in enumerate(published)
    ]
