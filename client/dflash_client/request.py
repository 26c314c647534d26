"""One generation request, before it is put on a wire: built by `DFlashClient`, encoded by the transports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Asked for with every request: they cost a few bytes, and `Delta` has a place for each.
RETURNED = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_token_ids",
    "return_spec_stats",
)


@dataclass(frozen=True, slots=True)
class Request:
    """The inputs of the serving contract. Exactly one of `text`, `token_ids` and `messages` is set."""

    model: str
    stream: bool
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        model: str,
        stream: bool,
        prompt: str | Sequence[int] | None,
        messages: Sequence[Mapping[str, Any]] | None,
        sampling: Mapping[str, Any],
    ) -> Request:
        """Check what the caller passed and sort it into the inputs.

        Raises `ValueError` unless exactly one of `prompt` and `messages` is given, and for text that has no UTF-8
        form.
        """
        if (prompt is None) == (messages is None):
            raise ValueError("give exactly one of prompt and messages")
        given = {name: value for name, value in sampling.items() if value is not None}
        if messages is not None:
            return cls(model, stream, messages=json.dumps(list(messages)), sampling=given)
        if isinstance(prompt, str):
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"the prompt is not UTF-8 text: {error.reason} at character {error.start}") from error
            return cls(model, stream, text=prompt, sampling=given)
        return cls(model, stream, token_ids=tuple(prompt or ()), sampling=given)

    def flags(self) -> dict[str, bool]:
        """The boolean inputs. The prompt is never wanted back; when streaming, the server leaves it out by itself."""
        flags = dict.fromkeys(RETURNED, True)
        flags["stream"] = self.stream
        if not self.stream:
            flags["exclude_input_in_output"] = True
        return flags

    def strings(self) -> dict[str, str]:
        """The string inputs that are set."""
        strings = {"text_input": self.text, "messages": self.messages}
        strings["sampling_parameters"] = json.dumps(self.sampling) if self.sampling else None
        return {name: value for name, value in strings.items() if value is not None}
