"""How fast a generation was, as seen by `dflash-triton generate` and `chat`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflash_client.results import Completion, Delta, GenerationResult


class TimedStream:
    """Passes deltas on, keeps them, and notes when they came."""

    def __init__(self, stream: Iterable[Delta]) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._deltas: list[Delta] = []

    def __iter__(self) -> Iterator[Delta]:
        for delta in self._stream:
            self._last_s = time.perf_counter() - self._start
            if self._first_s is None and delta.num_output_tokens:
                self._first_s = self._last_s
            self._deltas.append(delta)
            yield delta

    def report(self) -> Report:
        """What has come so far."""
        return Report(GenerationResult.from_deltas(self._deltas), self._first_s, self._last_s)


@dataclass(frozen=True)
class Report:
    """A generation and its times in seconds, as seen from here (network and connecting included)."""

    result: GenerationResult
    time_to_first_token_s: float | None
    elapsed_s: float

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(completion.num_output_tokens for completion in self.result.completions)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all completions over the whole time."""
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def as_json(self) -> str:
        """One object: the first completion's fields, the times, and under `completions` all of them."""
        first, *others = self.result.completions
        body: dict[str, Any] = {
            **_fields(first),
            "num_input_tokens": self.result.num_input_tokens,
            "time_to_first_token_s": self.time_to_first_token_s,
            "elapsed_s": self.elapsed_s,
            "tokens_per_s": self.tokens_per_s,
        }
        if others:
            body["completions"] = [_fields(completion) for completion in self.result.completions]
        return json.dumps(body, ensure_ascii=False)

    def as_text(self) -> str:
        """Several lines for people."""
        result, stats = self.result, self.result.spec_stats
        first = "none" if self.time_to_first_token_s is None else f"{self.time_to_first_token_s * 1000:.1f} ms"
        lines = [
            f"tokens                 {result.num_input_tokens} in{_cached(stats, ' ({} cached)')}, "
            f"{self.num_output_tokens} out, finish reason {result.finish_reason}",
            f"time to first token    {first}",
            f"speed                  {self.tokens_per_s:.1f} tokens/s over {self.elapsed_s:.3f} s in all",
        ]
        if stats.get("num_drafts"):
            per_position = " ".join(str(count) for count in stats.get("num_accepted_tokens_per_pos", []))
            lines += [
                f"acceptance length      {stats['acceptance_length']:.2f} "
                f"({stats['num_accepted_tokens']} accepted in {stats['num_drafts']} drafts)",
                f"accepted per position  {per_position}",
            ]
        else:
            lines.append("acceptance length      no drafts")
        return "\n".join(lines)

    def logprobs_as_text(self) -> str:
        """A line for each token of the first completion: its text, its log-probability, and the likeliest tokens."""
        lines = []
        for token_id, entries in zip(self.result.token_ids, self.result.logprobs or (), strict=False):
            chosen = entries.get(token_id)
            others = ", ".join(
                f"{entry.decoded_token!r} {entry.logprob:.3f}"
                for _, entry in sorted(entries.items(), key=lambda item: -item[1].logprob)
            )
            text, logprob = ("", "-") if chosen is None else (repr(chosen.decoded_token), f"{chosen.logprob:.3f}")
            lines.append(f"{token_id:>8} {text:<16} {logprob:>8}   {others}")
        return "\n".join([f"{'token':>8} {'text':<16} {'logprob':>8}   likeliest", *lines])

    def as_line(self) -> str:
        """The same in one line."""
        result, stats = self.result, self.result.spec_stats
        accepted = f"acceptance length {stats['acceptance_length']:.2f}" if stats.get("num_drafts") else "no drafts"
        line = f"{self.num_output_tokens} tokens, {self.tokens_per_s:.1f} tokens/s, {accepted}" + _cached(
            stats, f", {{}} of {result.num_input_tokens} prompt tokens cached"
        )
        return line + (", cut off at --max-tokens or the model's length" if result.finish_reason == "length" else "")


def _cached(stats: Mapping[str, Any], text: str) -> str:
    """`text` with the number of cached prompt tokens; nothing where the server keeps it to itself."""
    cached = stats.get("num_cached_tokens")
    return "" if cached is None else text.format(cached)


def _fields(completion: Completion) -> dict[str, Any]:
    """A completion as JSON has it; what was not asked for is left out."""
    return {name: value for name, value in asdict(completion).items() if value is not None or name == "finish_reason"}
