"""One log line every ten seconds on what the engine does, while it has work. Rates are those since the last line."""

from __future__ import annotations

from dflash_backend.messages import EngineStats

INTERVAL_S = 10.0


class ActivityLog:
    """Turns the engine's running counters into lines. Owned by one thread."""

    def __init__(self) -> None:
        self._latest = EngineStats()
        self._said = EngineStats()
        self._said_at: float | None = None

    def follow(self, stats: EngineStats) -> None:
        """Take the engine's newest counters."""
        self._latest = stats

    def restart(self) -> None:
        """The engine has died: the counters of the next one start at zero."""
        self._latest = self._said = EngineStats()

    def line(self, now: float) -> str | None:
        """The line that is due at `now` (seconds of a monotonic clock), or None.

        None within ten seconds of the last line, and while there is neither a request nor a new token.
        """
        if self._said_at is None:
            self._said_at = now
        seconds = now - self._said_at
        if seconds < INTERVAL_S:
            return None
        before, stats = self._said, self._latest
        self._said, self._said_at = stats, now
        prompt = stats.num_prompt_tokens - before.num_prompt_tokens
        generated = stats.num_generation_tokens - before.num_generation_tokens
        present = stats.num_requests_running + stats.num_requests_waiting
        if not (prompt or generated or present):
            return None
        drafted = stats.spec_decoding - before.spec_decoding
        queries = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        parts = [
            f"prompt {prompt / seconds:.1f} tokens/s",
            f"generated {generated / seconds:.1f} tokens/s",
            f"acceptance length {drafted.acceptance_length:.2f}" if drafted.num_drafts else "no drafts",
            f"prefix hits {hits / queries:.1%}" if queries else "no prefix look-ups",
            f"running {stats.num_requests_running}",
            f"waiting {stats.num_requests_waiting}",
            f"KV blocks in use {stats.kv_cache_usage:.1%}",
        ]
        return "activity: " + ", ".join(parts)
