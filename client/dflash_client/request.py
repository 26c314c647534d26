"""One generation request, before a transport encodes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from dflash_client.connection import check_headers
from dflash_client.sampling import NULL

# Asked for with every request: they cost a few bytes, and `Delta` has a place for each. The log-probabilities cost more
# and come with the sampling parameter `logprobs`.
RETURNED = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_spec_stats",
)
RETURNED_WITH_LOGPROBS = ("return_logprobs", "return_cumulative_logprob")


@dataclass(frozen=True, slots=True)
class Request:
    """The inputs of the server's model. Exactly one of `text`, `token_ids` and `messages` (JSON) is set, or `describe`,
    or `swap_drafter` (JSON), or `delta_stream`, the name of one that it opens.

    `sampling` is the JSON object of the sampling parameters, or None where there are none. `headers` go with this
    request, beside those of the connection.
    """

    model: str
    stream: bool
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: str | None = None
    sampling: str | None = None
    wants_logprobs: bool = False
    wants_steps: bool = False
    wants_stop_reason: bool = False
    describe: bool = False
    swap_drafter: str | None = None
    delta_stream: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def build(
        cls,
        model: str,
        stream: bool,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        dumps: Callable[[Any], str] = json.dumps,
    ) -> Request:
        """Check what the caller passed and sort it into the inputs. Sampling parameters that are None are left out,
        `NULL` is sent as null; `return_steps` among them asks for `Delta.steps`. `dumps` writes JSON.

        Raises `ValueError` unless exactly one of `prompt` and `messages` is given, and for what no request can carry:
        text without a UTF-8 form, values without a JSON form, ids that are no 64-bit integers, odd headers.
        """
        if (prompt is None) == (messages is None):
            raise ValueError("give exactly one of prompt and messages")
        given = {name: None if value is NULL else value for name, value in sampling.items() if value is not None}
        wants_steps = bool(given.pop("return_steps", False))
        return cls(
            model,
            stream,
            text=_text(prompt) if isinstance(prompt, str) else None,
            token_ids=None if prompt is None or isinstance(prompt, str) else _token_ids(prompt),
            messages=None if messages is None else as_json(list(messages), "messages", dumps),
            sampling=as_json(given, "sampling parameters", dumps) if given else None,
            wants_logprobs=given.get("logprobs") is not None,
            wants_steps=wants_steps,
            # Without them it is always null.
            wants_stop_reason=bool(given.get("stop") or given.get("stop_token_ids")),
            headers=check_headers(headers or {}),
        )

    @property
    def generates(self) -> bool:
        """Whether it asks for an answer, which has a reason for its end."""
        return not self.describe and self.swap_drafter is None and self.delta_stream is None

    def flags(self) -> dict[str, bool]:
        """The boolean inputs. The prompt is never wanted back; when streaming, the server leaves it out by itself."""
        if self.describe:
            return {"describe": True}
        if not self.generates:
            return {}
        names = RETURNED + (RETURNED_WITH_LOGPROBS if self.wants_logprobs else ())
        flags = dict.fromkeys(names, True)
        flags["stream"] = self.stream
        if self.wants_steps:
            flags["return_steps"] = True
        if self.wants_stop_reason:
            flags["return_stop_reason"] = True
        if not self.stream:
            flags["exclude_input_in_output"] = True
        return flags

    def strings(self) -> dict[str, str]:
        """The string inputs that are set."""
        strings = {
            "text_input": self.text,
            "messages": self.messages,
            "sampling_parameters": self.sampling,
            "swap_drafter": self.swap_drafter,
            "delta_stream": self.delta_stream,
        }
        return {name: value for name, value in strings.items() if value is not None}


def _text(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error.reason} at character {error.start}") from error
    return prompt


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    # Asking whether a value is a `SupportsIndex` takes microseconds: plain numbers are looked at all together.
    if set(map(type, prompt)) == {int} and min(prompt) >= -(2**63) and max(prompt) < 2**63:
        return tuple(prompt)
    for position, token_id in enumerate(prompt):
        if not isinstance(token_id, SupportsIndex) or not -(2**63) <= token_id.__index__() < 2**63:
            raise ValueError(f"the prompt has {token_id!r} at position {position}; allowed: token ids, or one text")
    return tuple(token_id.__index__() for token_id in prompt)


def as_json(value: Any, what: str, dumps: Callable[[Any], str] = json.dumps) -> str:
    """What is sent as JSON. Raises `ValueError` for what has no such form."""
    try:
        return dumps(value)
    except RecursionError:
        raise ValueError(f"the {what} cannot be sent as JSON: they are nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {what} cannot be sent as JSON: {error}") from None
