"""What a generation yields: `Delta` while it streams, `GenerationResult` when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of the server: the new text, and the new tokens that it came from.

    `finish_reason` and `spec_stats` are set on the last delta only. `num_output_tokens` counts `token_ids`.
    `spec_stats` has the fields of the serving contract, such as `acceptance_length` and `num_cached_tokens`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    num_output_tokens: int = 0
    num_input_tokens: int | None = None
    finish_reason: str | None = None
    spec_stats: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation. `text` is the completion alone; `finish_reason` is `stop`, `length` or `abort`."""

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    token_ids: tuple[int, ...] = ()
    spec_stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_deltas(cls, deltas: Iterable[Delta]) -> GenerationResult:
        """Join the deltas of one generation."""
        text: list[str] = []
        token_ids: list[int] = []
        finish_reason: str | None = None
        num_input_tokens = num_output_tokens = 0
        spec_stats: dict[str, Any] = {}
        for delta in deltas:
            text.append(delta.text)
            token_ids.extend(delta.token_ids)
            num_output_tokens += delta.num_output_tokens
            num_input_tokens = delta.num_input_tokens if delta.num_input_tokens is not None else num_input_tokens
            finish_reason = delta.finish_reason or finish_reason
            spec_stats = delta.spec_stats if delta.spec_stats is not None else spec_stats
        return cls("".join(text), finish_reason, num_input_tokens, num_output_tokens, tuple(token_ids), spec_stats)
