"""A request on its way: what the engine said about it, and what of that was not sent. Used by `triton.service`.

A request is one Triton request and `n` completions. Each completion is a request of its own to the engine; the client
sees them together, in one response.
"""

from __future__ import annotations

import json
import time

import msgspec

from dflash_backend.messages import FinishReason, RequestStats, SamplingParams, TokenDelta, TokenLogprobs
from dflash_backend.text.detokenizer import Detokenizer
from dflash_backend.text.request import ParsedRequest
from dflash_backend.text.sampling_params import child
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.triton.responder import Responder

# What JSON has no number for: a token that the model gives no chance at all. vLLM's value.
LOWEST_LOGPROB = -9999.0
SEPARATOR = "/"
# A token of the output `token_ids`.
TOKEN_ID_BYTES = 4


class Completion:
    """One of a request's completions: what of it was not sent yet, and what it came to so far."""

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer, parsed.sampling)
        self._tell_tokens = parsed.returns.token_ids
        # Not only their sum.
        self._tell_logprobs = parsed.returns.logprobs and parsed.sampling.logprobs is not None
        self._end_sent = False
        self.text: list[str] = [parsed.prefix] if parsed.prefix else []
        self.token_ids: list[int] = []
        # The JSON of each token.
        self.logprobs: list[str] = []
        # Of what was not sent yet; kept as it grows, since it is looked at after every step.
        self.num_bytes = len(parsed.prefix.encode())
        self.cumulative_logprob = 0.0
        # A stop string was found.
        self.stopped = False
        self.finish_reason: FinishReason | None = None
        self.stats: RequestStats | None = None
        self.num_tokens = 0
        self.last_token_at: float | None = None

    def add(self, delta: TokenDelta) -> int:
        """Take new tokens; how many of them count. Those past a stop string do not, and none after it."""
        if self.finish_reason is not None:
            return 0
        finished = delta.finish_reason is not None
        if delta.logprobs is not None:
            count = self._add_each(delta.token_ids, delta.logprobs, finished)
        else:
            count = self._append(delta.token_ids, finished)
        self.token_ids += delta.token_ids[:count]
        self.num_tokens += count
        self.num_bytes += count * TOKEN_ID_BYTES
        if finished or self.stopped:
            self.finish_reason = "stop" if self.stopped else delta.finish_reason
            self.stats = delta.stats
            if delta.stats is not None and count < len(delta.token_ids):
                self.stats = delta.stats.with_last_step_cut(len(delta.token_ids), count)
        return count

    @property
    def due(self) -> bool:
        """Whether something new should go out."""
        if self.finish_reason is not None:
            return not self._end_sent
        return bool(self.text or (self._tell_tokens and self.token_ids))

    def clear(self) -> None:
        """Everything so far was sent."""
        self.text, self.token_ids, self.logprobs, self.num_bytes = [], [], [], 0
        self._end_sent = self.finish_reason is not None

    def _append(self, token_ids: list[int], finished: bool) -> int:
        text, self.stopped, count = self._detokenizer.append(token_ids, finished)
        if text:
            self.text.append(text)
            self.num_bytes += len(text.encode())
        return count

    def _add_each(self, token_ids: list[int], logprobs: list[TokenLogprobs], finished: bool) -> int:
        """`_append` token by token: a token's own text depends on what comes before it."""
        for index, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
            last = finished and index == len(token_ids) - 1
            if self._tell_logprobs:
                self.logprobs.append(self._logprobs_json(entry, last))
                self.num_bytes += len(self.logprobs[-1])
            self.cumulative_logprob += entry.logprobs[0]
            self._append([token_id], last)
            if self.stopped:
                return index + 1
        if finished and not token_ids:
            self._append([], True)
        return len(token_ids)

    def _logprobs_json(self, entry: TokenLogprobs, last: bool) -> str:
        """The contract's object for one position, as JSON in ASCII. The new token is the first, also among equals."""
        return json.dumps(
            {
                str(token_id): {
                    "logprob": max(logprob, LOWEST_LOGPROB),
                    "rank": rank,
                    "decoded_token": self._detokenizer.would_add(token_id, last),
                }
                for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
            }
        )


class Flight:
    """A Triton request that the engine works on."""

    def __init__(self, request_id: str, responder: Responder, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.request_id = request_id
        self.responder = responder
        self.parsed = parsed
        self.completions = [Completion(parsed, tokenizer) for _ in range(parsed.sampling.n)]
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.answered = False
        # All of it is on its way to the engine.
        self.sent = False

    def add(self, delta: TokenDelta) -> tuple[int, float]:
        """Take new tokens of one of the completions: how many have one before them, and the mean time since that.

        The tokens of a step come together and share the time since the step before; a first token has none before it.
        """
        now = time.monotonic()
        completion = self.completions[_index(delta.request_id)]
        count, before = completion.add(delta), completion.last_token_at
        if not count:
            return 0, 0.0
        if self.first_token_at is None:
            self.first_token_at = now
        completion.last_token_at = now
        return (count - 1, 0.0) if before is None else (count, (now - before) / count)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all completions that were not sent yet."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that the request's responses hold: of those that were sent, and of what waits to be."""
        return self.responder.num_bytes_sent + sum(completion.num_bytes for completion in self.completions)

    def clear(self) -> None:
        """Everything so far was sent."""
        self.answered = True
        for completion in self.completions:
            completion.clear()

    def has_ended(self, engine_id: str) -> bool:
        """Whether a completion has ended."""
        return self.completions[_index(engine_id)].finish_reason is not None

    def num_tokens(self, engine_id: str) -> int:
        """How many tokens of a completion belong to its answer, so far."""
        return self.completions[_index(engine_id)].num_tokens

    @property
    def ended(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def due(self) -> bool:
        """Whether a response should go out now: at the end, and when streaming as soon as there is something new."""
        if self.parsed.stream:
            return any(completion.due for completion in self.completions)
        return self.ended

    @property
    def queue_time_s(self) -> float:
        """How long the request waited for its first step."""
        return min(completion.stats.queue_time_s for completion in self.completions if completion.stats is not None)

    @property
    def engine_ids(self) -> list[str]:
        """The ids of the completions at the engine: the request's own, with the completion's number from 1 on."""
        return [
            f"{self.request_id}{SEPARATOR}{index}" if index else self.request_id
            for index in range(len(self.completions))
        ]

    def engine_sampling(self, index: int) -> SamplingParams:
        """What the engine is asked for completion `index`: log-probabilities only if the client wants to see them."""
        returns, asked = self.parsed.returns, self.parsed.sampling.logprobs
        logprobs = asked if returns.logprobs else None
        if logprobs is None and returns.cumulative_logprob:
            logprobs = 0
        return msgspec.structs.replace(child(self.parsed.sampling, index), logprobs=logprobs)


def flight_id(engine_id: str) -> str:
    """The id of the request that a request of the engine belongs to."""
    return engine_id.partition(SEPARATOR)[0]


def _index(engine_id: str) -> int:
    return int(engine_id.partition(SEPARATOR)[2] or 0)
