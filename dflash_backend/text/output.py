"""Output processing: turns the engine's tokens of a request into its answer, for Triton and for `LLM`.

An answer is text up to the first stop string, token ids, log-probabilities, finish reasons and statistics. A request
has `n` completions. Each is a request of its own to the engine; the client sees them together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from dflash_backend.messages import (
    FinishReason,
    GenerationRequest,
    KVTransferParams,
    RequestStats,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from dflash_backend.text.detokenizer import Decoder, Detokenizer, context_of
from dflash_backend.text.request import ParsedRequest
from dflash_backend.text.sampling_params import child

# vLLM's value for a token of probability 0: JSON has no infinities.
LOWEST_LOGPROB = -9999.0
SEPARATOR = "/"
# Bytes of a token in the output `token_ids`.
TOKEN_ID_BYTES = 4
# Bytes of an entry of the output `steps`, about.
STEP_BYTES = 14
# This many log-probabilities of a prompt, about 1 MB, are a response of their own when streaming.
PROMPT_PIECE = 1 << 14


class AddedTokens(NamedTuple):
    """What a delta added to its completion.

    num_intervals: new tokens that have a token before them. interval_s: the mean time since that token, in seconds.
    stopped_at: output tokens of the completion when a stop string ends it before the engine's own end, which the engine
    must be told; else None.
    """

    num_intervals: int = 0
    interval_s: float = 0.0
    stopped_at: int | None = None


class OutputStep(NamedTuple):
    """What a step of the engine added to a completion: tokens, of which all but one were drafts, the drafts that it
    verified, and characters of text."""

    num_tokens: int
    num_draft_tokens: int
    num_chars: int


class CompletionState:
    """One completion: its new output since the last `clear`, and totals.

    text: pieces of text, the first one the request's `prefix`. logprobs: an entry a token; logprobs_json: the same as
    JSON text, as clients get it. steps: one for each delta, where they were asked for. num_bytes: of all of these.
    cumulative_logprob, num_tokens: totals.
    """

    def __init__(
        self, parsed: ParsedRequest, tokenizer: Decoder, logprobs_as_json: bool, context: Sequence[int] = ()
    ) -> None:
        """`context`: the prompt's last tokens, as `context_of` gives them."""
        self._detokenizer = Detokenizer(tokenizer, parsed.sampling, context)
        self._returns_token_ids = parsed.returns.token_ids
        self._returns_steps = parsed.returns.steps
        # Otherwise only their sum.
        self._returns_logprobs = parsed.returns.logprobs and parsed.sampling.logprobs is not None
        self._logprobs_as_json = logprobs_as_json
        self._stream_interval = parsed.stream_interval
        self._stopped = False
        self._end_sent = False
        self._was_sent = False
        self.text: list[str] = [parsed.prefix] if parsed.prefix else []
        self.token_ids: list[int] = []
        # All tokens of the answer, where they are kept.
        self.answer: list[int] | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.logprobs_json: list[str] = []
        self.steps: list[OutputStep] = []
        self.num_bytes = len(parsed.prefix.encode())
        self.cumulative_logprob = 0.0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        # The stop string or stop token that ended it, as `Detokenizer.stop_reason`.
        self.stop_reason: str | int | None = None
        self.stats: RequestStats | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None

    def add(self, delta: TokenDelta) -> AddedTokens:
        """Append the tokens of a step up to a stop string. Tokens past it do not count, nor do later deltas.

        The tokens of a step arrive together and share the time since the step before.
        """
        if self.finish_reason is not None:
            return AddedTokens()
        now = time.monotonic()
        num_pieces = len(self.text)
        count = self._append_all(delta)
        if self._returns_steps and delta.token_ids:
            self.steps.append(OutputStep(count, delta.num_draft_tokens, sum(map(len, self.text[num_pieces:]))))
            self.num_bytes += STEP_BYTES
        self.num_tokens += count
        self.num_bytes += count * TOKEN_ID_BYTES
        self.token_ids += delta.token_ids[:count]
        if self.answer is not None:
            self.answer += delta.token_ids[:count]
        if self._stopped or delta.finish_reason is not None:
            self.finish_reason, self.finished_at = "stop" if self._stopped else delta.finish_reason, now
            if self.finish_reason == "stop" and delta.token_ids:
                self.stop_reason = self._detokenizer.stop_reason(delta.token_ids[-1])
            self.stats = delta.stats and delta.stats.with_last_step_trimmed(len(delta.token_ids), count)
        is_early = delta.finish_reason is None or count < len(delta.token_ids)
        stopped_at = self.num_tokens if self._stopped and is_early else None
        if not count:
            return AddedTokens(stopped_at=stopped_at)
        before, self.last_token_at = self.last_token_at, now
        if before is None:
            self.first_token_at = now
            return AddedTokens(count - 1, 0.0, stopped_at)
        return AddedTokens(count, (now - before) / count, stopped_at)

    @property
    def has_output(self) -> bool:
        """Whether a response should leave: there is new output, or the end was not sent. After the first one, as many
        tokens have come as the client or the server asks for."""
        if self.finish_reason is not None:
            return not self._end_sent
        if self._was_sent and len(self.token_ids) < self._stream_interval:
            return False
        return bool(self.text or (self._returns_token_ids and self.token_ids))

    def clear(self) -> None:
        """Drop the output so far: it was sent."""
        self.text, self.token_ids, self.logprobs, self.logprobs_json, self.num_bytes = [], [], [], [], 0
        self.steps = []
        self._was_sent = self.num_tokens > 0
        self._end_sent = self.finish_reason is not None

    def _append_all(self, delta: TokenDelta) -> int:
        """Append a delta's text and log-probabilities; how many of its tokens belong to the answer."""
        token_ids, finished = delta.token_ids, delta.finish_reason is not None
        if delta.logprobs is None or not token_ids:
            return self._append(token_ids, finished)
        # Token by token: the text of a token depends on the tokens before it.
        for index, (token_id, entry) in enumerate(zip(token_ids, delta.logprobs, strict=True)):
            last = finished and index == len(token_ids) - 1
            if self._returns_logprobs:
                self._append_logprobs(entry, last)
            self.cumulative_logprob += entry.logprobs[0]
            self._append([token_id], last)
            if self._stopped:
                return index + 1
        return len(token_ids)

    def _append(self, token_ids: list[int], finished: bool) -> int:
        text, self._stopped, count = self._detokenizer.append(token_ids, finished)
        if text:
            self.text.append(text)
            self.num_bytes += len(text.encode())
        return count

    def _append_logprobs(self, entry: TokenLogprobs, last: bool) -> None:
        if not self._logprobs_as_json:
            self.logprobs.append(entry)
            return
        self.logprobs_json.append(logprobs_json(entry, lambda token_id: self._detokenizer.would_add(token_id, last)))
        self.num_bytes += len(self.logprobs_json[-1])


def logprobs_json(entry: TokenLogprobs, text_of: Callable[[int], str]) -> str:
    """The JSON object of one position, in ASCII. The chosen token comes first, also among tokens of the same
    probability. `text_of` gives a token's text."""
    return json.dumps(
        {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": rank,
                "decoded_token": text_of(token_id),
            }
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }
    )


class PromptLogprobsState:
    """Log-probabilities of a request's prompt, None for its first token: those that came since the last `clear`, as
    entries, or as JSON texts. The texts of the prompt's own tokens join to its text, special tokens apart."""

    def __init__(self, tokenizer: Decoder, as_json: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._as_json = tokenizer, as_json
        self._texts: dict[int, str] = {}
        self._detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True))
        self._first, self._num_left = prompt_token_ids[0], len(prompt_token_ids) - 1
        self._begun = False
        self.entries: list[TokenLogprobs | None] = []
        self.json: list[str] = []
        self.num_bytes = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Append those of a delta."""
        if not self._begun:
            self._begun = True
            self.entries.append(None)
            self.json.append("null")
            if self._as_json:
                self._detokenizer.append([self._first], False)
        if self._as_json:
            added = [self._json_of(entry) for entry in entries]
            self.num_bytes += sum(map(len, added))
            self.json += added
        else:
            self.entries += entries

    def clear(self) -> None:
        """Drop those so far: they were sent."""
        self.entries, self.json, self.num_bytes = [], [], 0

    def _json_of(self, entry: TokenLogprobs) -> str:
        """The JSON object of the next position."""
        detokenizer, own = self._detokenizer, entry.token_ids[0]
        self._num_left -= 1
        text = detokenizer.would_add(own, self._num_left == 0)
        detokenizer.append([own], False)
        if not text and detokenizer.is_skipped(own):
            text = self._text_of(own)
        return logprobs_json(entry, lambda token_id: text if token_id == own else self._text_of(token_id))

    def _text_of(self, token_id: int) -> str:
        """The text of a token that is not the first one. Prompts and their likely tokens repeat."""
        if token_id not in self._texts:
            alone = self._tokenizer.decode([token_id], False)
            self._texts[token_id] = self._tokenizer.decode([token_id, token_id], False)[len(alone) :]
        return self._texts[token_id]


class RequestState:
    """A request in progress and its completions. Times are those of `time.monotonic`, in seconds."""

    def __init__(
        self, request_id: str, parsed: ParsedRequest, tokenizer: Decoder, logprobs_as_json: bool = True
    ) -> None:
        self.request_id = request_id
        self.parsed = parsed
        prompt = parsed.prompt_token_ids
        context = context_of(tokenizer, prompt)
        self.completions = [
            CompletionState(parsed, tokenizer, logprobs_as_json, context) for _ in range(parsed.sampling.n)
        ]
        asked = parsed.sampling.prompt_logprobs is not None
        self.prompt_logprobs = PromptLogprobsState(tokenizer, logprobs_as_json, prompt) if asked else None
        self.kv_transfer_params: KVTransferParams | None = None
        """Where the KV of its prompt is kept for another server."""
        self._tokens_a_piece = max(1, PROMPT_PIECE // (1 + (parsed.sampling.prompt_logprobs or 0)))
        self.arrived_at = time.monotonic()
        self.num_bytes = sum(completion.num_bytes for completion in self.completions)
        """Bytes of the output of all completions, and of the prompt's log-probabilities, since the last `clear`."""

    def parts(self, delta: TokenDelta) -> Iterator[TokenDelta]:
        """A delta in parts, between which a response should leave where there is output: one, but for the
        log-probabilities of a long prompt when streaming."""
        of_prompt, most = delta.prompt_logprobs, self._tokens_a_piece
        if not self.parsed.stream or len(of_prompt) <= most:
            yield delta
            return
        last = (len(of_prompt) - 1) // most * most
        for start in range(0, last, most):
            yield TokenDelta(delta.request_id, [], prompt_logprobs=of_prompt[start : start + most])
        yield msgspec.structs.replace(delta, prompt_logprobs=of_prompt[last:])

    def add(self, delta: TokenDelta) -> AddedTokens:
        """Append new tokens of one completion, by the delta's request id."""
        if self.prompt_logprobs is not None and (delta.prompt_logprobs or delta.token_ids):
            # With its first token, for a prompt of one token, which has no others.
            self.num_bytes -= self.prompt_logprobs.num_bytes
            self.prompt_logprobs.add(delta.prompt_logprobs)
            self.num_bytes += self.prompt_logprobs.num_bytes
        self.kv_transfer_params = delta.kv_transfer_params or self.kv_transfer_params
        completion = self.completions[int(delta.request_id.partition(SEPARATOR)[2] or 0)]
        before = completion.num_bytes
        added = completion.add(delta)
        self.num_bytes += completion.num_bytes - before
        return added

    def clear(self) -> None:
        """Drop the output so far: it was sent."""
        for completion in self.completions:
            completion.clear()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.clear()
        self.num_bytes = 0

    def keep_answers(self) -> None:
        """Keep all tokens of each completion's answer, also those that were sent."""
        for completion in self.completions:
            completion.answer = []

    @property
    def num_new_tokens(self) -> int:
        """Tokens of all completions since the last `clear`."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def has_output(self) -> bool:
        """Whether a response should leave now: at the end, and when streaming as soon as there is new output, or many
        log-probabilities of the prompt."""
        if self.parsed.stream:
            of_prompt = 0 if self.prompt_logprobs is None else len(self.prompt_logprobs.json)
            return of_prompt >= self._tokens_a_piece or any(completion.has_output for completion in self.completions)
        return self.finished

    @property
    def first_token_at(self) -> float | None:
        """When the first token of any completion arrived; None before."""
        times = [one.first_token_at for one in self.completions if one.first_token_at is not None]
        return min(times, default=None)

    @property
    def engine_ids(self) -> list[str]:
        """Ids of the completions at the engine: the request's own, followed by the completion's index from 1 on."""
        others = range(1, len(self.completions))
        return [self.request_id, *(f"{self.request_id}{SEPARATOR}{index}" for index in others)]

    def generation_requests(
        self, eos_token_ids: tuple[int, ...], deadline_s: float = 0.0
    ) -> Iterator[GenerationRequest]:
        """The engine's request for each completion. It asks for log-probabilities only if the client gets to see
        them."""
        returns, logprobs = self.parsed.returns, self.parsed.sampling.logprobs
        if not returns.logprobs:
            logprobs = None
        if logprobs is None and returns.cumulative_logprob:
            logprobs = 0
        sampling = msgspec.structs.replace(self.parsed.sampling, logprobs=logprobs)
        for index, engine_id in enumerate(self.engine_ids):
            yield GenerationRequest(
                engine_id, self.parsed.prompt_token_ids, child(sampling, index), eos_token_ids, deadline_s
            )


def request_id_of(engine_id: str) -> str:
    """The id of the request that one of its completions belongs to."""
    return engine_id.partition(SEPARATOR)[0]
