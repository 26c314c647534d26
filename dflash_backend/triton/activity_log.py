"""One log line every ten seconds on what the engine does, while it has work. Rates are those since the last line."""

from __future__ import annotations

from dflash_backend.messages import EngineStats
from dflash_backend.spec_stats import acceptance_length

INTERVAL_S = 10.0
# Where next to nothing was accepted of as many requests and steps, a drafter is misread or of another pair.
MANY_REQUESTS, MANY_DRAFTS, NEXT_TO_NOTHING = 20, 500, 1.05
_NOTHING = EngineStats()


class ActivityLog:
    """Turns the engine's running counters into lines. Owned by one thread."""

    def __init__(self) -> None:
        # By the engine's number.
        self._latest: dict[int, EngineStats] = {}
        self._said: dict[int, EngineStats] = {}
        self._said_at: float | None = None
        self._num_finished = 0
        self._has_warned = False

    def follow(self, stats: EngineStats, index: int = 0) -> None:
        """Take an engine's newest counters."""
        self._latest[index] = stats

    def note_finished(self) -> None:
        """A request has ended."""
        self._num_finished += 1

    def warning(self) -> str | None:
        """What to check where next to no draft was accepted since the engines started, of many requests; once, else
        None."""
        if self._has_warned or self._num_finished < MANY_REQUESTS:
            return None
        # What was looked up in place of the drafter's blocks is not its own.
        drafts = sum(stats.spec_decoding.num_drafts - stats.lookup.num_drafts for stats in self._latest.values())
        accepted = sum(
            max(stats.spec_decoding.num_accepted_tokens - stats.lookup.num_accepted_tokens, 0)
            for stats in self._latest.values()
        )
        length = acceptance_length(drafts, accepted)
        if drafts < MANY_DRAFTS or length is None or length > NEXT_TO_NOTHING:
            return None
        self._has_warned = True
        return (
            f"next to no draft is accepted: acceptance length {length:.2f} over {drafts} steps with drafts, of "
            f"{self._num_finished} requests. The text is right, but slower than without a drafter. Check that it was "
            "made for this target, and what `dflash-triton inspect TARGET --draft DRAFTER` warns of: a field that its "
            "config.json lacks may be read otherwise than it was trained; `dflash-triton eval` measures acceptance"
        )

    def restart(self, index: int = 0) -> None:
        """The engine has died: the counters of the next one start at zero."""
        self._latest.pop(index, None)
        self._said.pop(index, None)

    def line(self, now: float) -> str | None:
        """The line that is due at `now` (seconds of a monotonic clock), or None.

        None within ten seconds of the last line, and while there is neither a request nor a new token.
        """
        if self._said_at is None:
            self._said_at = now
        seconds = now - self._said_at
        if seconds < INTERVAL_S:
            return None
        pairs = [(self._said.get(index, _NOTHING), stats) for index, stats in self._latest.items()]
        self._said, self._said_at = dict(self._latest), now
        spec = [(before.spec_decoding, stats.spec_decoding) for before, stats in pairs]
        prompt = sum(stats.num_prompt_tokens - before.num_prompt_tokens for before, stats in pairs)
        generated = sum(stats.num_generation_tokens - before.num_generation_tokens for before, stats in pairs)
        running = sum(stats.num_requests_running for _, stats in pairs)
        waiting = sum(stats.num_requests_waiting for _, stats in pairs)
        if not (prompt or generated or running or waiting):
            return None
        drafts = sum(stats.num_drafts - before.num_drafts for before, stats in spec)
        accepted = sum(stats.num_accepted_tokens - before.num_accepted_tokens for before, stats in spec)
        queries = sum(stats.prefix_cache_queries - before.prefix_cache_queries for before, stats in pairs)
        hits = sum(stats.prefix_cache_hits - before.prefix_cache_hits for before, stats in pairs)
        usage = sum(stats.kv_cache_usage for _, stats in pairs) / len(pairs)
        parts = [
            f"prompt {prompt / seconds:.1f} tokens/s",
            f"generated {generated / seconds:.1f} tokens/s",
            f"acceptance length {acceptance_length(drafts, accepted):.2f}" if drafts else "no drafts",
            f"prefix hits {hits / queries:.1%}" if queries else "no prefix look-ups",
            f"running {running}",
            f"waiting {waiting}",
            f"KV blocks in use {usage:.1%}",
        ]
        return "activity: " + ", ".join(parts)
