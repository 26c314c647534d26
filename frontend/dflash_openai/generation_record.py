"""What became of the generation of one HTTP request: times, tokens, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_client import Delta


@dataclass
class GenerationRecord:
    """Kept in the request's state as `generation`. Times are those of `time.time_ns`. `error` is the code of the error
    that ended it; `queue_time_s` the longest that a completion waited for its first step, None where it is not known.
    """

    model: str
    sampling: Mapping[str, Any]
    num_prompt_tokens: int
    began_ns: int = field(default_factory=time.time_ns)
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    queue_time_s: float | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        """Count a delta that has come."""
        if delta.num_output_tokens:
            self.last_token_ns = time.time_ns()
            if self.first_token_ns is None:
                self.first_token_ns = self.last_token_ns
            self.num_output_tokens += delta.num_output_tokens
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
        if (stats := delta.spec_stats) is not None:
            self.num_drafts += stats.get("num_drafts", 0)
            self.num_accepted_tokens += stats.get("num_accepted_tokens", 0)
            if stats.get("queue_time_s") is not None:
                self.queue_time_s = max(self.queue_time_s or 0.0, stats["queue_time_s"])
