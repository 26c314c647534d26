"""Logits processors: what requests change in the target's logits.

The order is vLLM v1's. Log-probabilities (`logprobs`) are those of the logits as the model gave them. Then come tokens
hidden by `allowed_token_ids` and `bad_words`, logit bias, stop tokens hidden before `min_tokens`, and penalties;
temperature and filters follow in `StepOps.target_tokens`.

A row with j drafts has j + 1 rows of logits behind one another, and the one after d1 .. di counts d1 .. di as output.
So a draft is compared with the token that the target alone would have given at its position (LOSSLESS). Nothing is
kept from step to step: everything follows from the tokens in the requests' state, so preemption and prefix hits have
nothing to restore, and a row may begin where only the device knows, behind a step in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.logprobs import PendingLogprobs, ranked_logprobs
from dflash_backend.worker.state import RequestRecord, RequestStates
from dflash_backend.worker.token_masks import hide_others
from dflash_backend.worker.transfers import put

# Penalties work on tensors of `[logits rows, vocab]`. With 16 rows of logits a request and 150,000 tokens, 8 requests
# are 80 MB for each of them.
PENALISED_AT_A_TIME = 8


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows that sample, `[n]` each but the ids. On the host: req_idx, num_draft int64, index of the request's state and
    number of drafts; lowest, highest int64, bounds of `position`. On the device: position int64, of the token that the
    first row of logits decides."""

    request_ids: list[str]
    req_idx: np.ndarray
    num_draft: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray
    position: torch.Tensor

    @classmethod
    def of(cls, batch: HostBatch, rows: np.ndarray, requests: RequestStates) -> SamplingMetadata:
        """Those of a step's `rows`, int64 `[n]`; to be called before the step changes the requests' state."""
        start, num_new, unverified = batch.start[rows], batch.num_new[rows], batch.num_unverified[rows]
        highest = start + num_new
        req_idx = batch.req_idx[rows]
        if unverified.any():
            index, upper, new, in_flight = put(np.stack([req_idx, highest, num_new, unverified]), requests.device)
            # The same choice as that of `prepare_step`.
            position = torch.where(in_flight > 0, requests.state.computed.index_select(0, index) + new, upper)
        else:
            position = put(highest, requests.device)
        ids = [batch.request_ids[i] for i in rows.tolist()]
        return cls(ids, req_idx, batch.num_draft[rows], highest - unverified, highest, position)

    @property
    def first(self) -> np.ndarray:
        """Index of each row's first logits: int64 `[n]`."""
        sizes = self.num_draft + 1
        starts: np.ndarray = np.cumsum(sizes) - sizes
        return starts


class LogitsProcessors:
    """The rows of a step whose requests change their logits, or want log-probabilities: `rows`, int64 `[n]`, at least
    one. The rows' numbers of drafts are known, and so is where their logits lie."""

    def __init__(self, batch: HostBatch, rows: np.ndarray, requests: RequestStates) -> None:
        self.rows = rows
        self._requests = requests
        num_logits = batch.num_logits
        first = np.cumsum(num_logits) - num_logits
        # The logits of these rows among those of the step, int64 `[sum(num_draft + 1)]`.
        _, flat = spans(first[rows], num_logits[rows])
        self.flat = put(flat, requests.device)
        self._raw: torch.Tensor | None = None
        self.metadata = SamplingMetadata.of(batch, rows, requests)

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates) -> LogitsProcessors | None:
        """Those of a step; None where no row asks for any."""
        rows = special_rows(batch, requests)
        return cls(batch, rows, requests) if len(rows) else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that tokens are chosen from, for those that the model gave, both `[D, vocab]`."""
        self._raw = logits.index_select(0, self.flat)
        processed = apply_processors(self._raw, self.metadata, self._requests)
        if processed is self._raw:
            return logits
        return logits.float().index_copy(0, self.flat, processed)

    def processed(self, logits: torch.Tensor) -> torch.Tensor:
        """What `apply` gives of these rows alone, which may be changed: `[sum(num_draft + 1), vocab]`."""
        own = logits.index_select(0, self.flat)
        return apply_processors(own, self.metadata, self._requests)

    def keep(self, logits: torch.Tensor) -> None:
        """Remember these `logits`, `[D, vocab]`, for log-probabilities, if any row asked."""
        if self._asks_logprobs:
            self._raw = logits.index_select(0, self.flat)

    @property
    def _asks_logprobs(self) -> bool:
        return bool((self._requests.num_logprobs[self.metadata.req_idx] >= 0).any())

    def logprobs(self, target_tokens: torch.Tensor, counts: torch.Tensor | None = None) -> PendingLogprobs | None:
        """What the rows that asked get, once the target's tokens are chosen; None where none asked. On a GPU nothing
        waits for the device.

        target_tokens: int64 `[D]`: accepted drafts are the target's own tokens, and so is the one that follows them.
        counts: int32 `[R]` on the host, accepted drafts; None where the host does not know them: then all drafts of the
        rows have log-probabilities, of which `PendingLogprobs.entries` leaves out those of rejected ones.
        """
        if not self._asks_logprobs:
            return None
        assert self._raw is not None
        num_top = self._requests.num_logprobs[self.metadata.req_idx]
        asking = (num_top >= 0).nonzero()[0]
        lens = self.metadata.num_draft[asking] + 1
        if counts is not None:
            lens = counts.numpy()[self.rows[asking]].astype(np.int64) + 1
        _, flat = spans(self.metadata.first[asking], lens)
        index = put(flat, self._raw.device)
        chosen = target_tokens.index_select(0, self.flat.index_select(0, index))
        ranked = ranked_logprobs(self._raw.index_select(0, index), chosen[:, None], int(num_top.max()))
        self._raw = None
        return PendingLogprobs.begin(ranked, self.rows[asking].tolist(), lens.tolist(), num_top[asking].tolist())


def special_rows(batch: HostBatch, requests: RequestStates) -> np.ndarray:
    """The rows that sample and whose requests change their logits or want log-probabilities: int64 `[n]`."""
    if not requests.num_processed:
        return np.zeros(0, dtype=np.int64)
    index = batch.req_idx
    # 0 for a request without `min_tokens`. The lowest start may then be below 0: an upper bound is cut at the
    # request's end, and the number of drafts in flight is not.
    min_end = requests.min_end[index]
    hides = (min_end > 0) & (min_end > batch.start + batch.num_new - batch.num_unverified)
    changes = hides | requests.biased[index] | requests.masked[index] | requests.penalised[index]
    asks = changes | (requests.num_logprobs[index] >= 0)
    rows: np.ndarray = (batch.sample & asks).nonzero()[0]
    return rows


def apply_processors(logits: torch.Tensor, metadata: SamplingMetadata, requests: RequestStates) -> torch.Tensor:
    """The logits that the rows of `metadata` choose from.

    logits: `[sum(num_draft + 1), vocab]`, not changed. Returns `logits` itself when no row asks for a change, else a
    float32 copy, in which the other rows have their values.
    """
    req_idx, num_draft = metadata.req_idx, metadata.num_draft
    hides = (requests.min_end[req_idx] > 0) & (requests.min_end[req_idx] > metadata.lowest)
    biased, penalised = requests.biased[req_idx], requests.penalised[req_idx]
    masked = requests.masked[req_idx]
    special = hides | biased | masked
    if not (special | penalised).any():
        return logits
    processed = logits.to(torch.float32, copy=True)
    first = metadata.first
    for i in special.nonzero()[0].tolist():
        record, index = requests.records[metadata.request_ids[i]], int(req_idx[i])
        part = processed[first[i] : first[i] + num_draft[i] + 1]
        if masked[i]:
            _mask(part, record, metadata.position[i], int(requests.num_prompt_tokens[index]), requests)
        if biased[i]:
            part.index_add_(1, record.bias_ids, record.bias.expand(len(part), -1))
        if hides[i]:
            positions = metadata.position[i] + torch.arange(len(part), device=part.device)
            early = (positions < int(requests.min_end[index]))[:, None]
            stops = part.index_select(1, record.stop_ids).masked_fill(early, float("-inf"))
            part.index_copy_(1, record.stop_ids, stops)
    which = penalised.nonzero()[0]
    for start in range(0, len(which), PENALISED_AT_A_TIME):
        _penalise(processed, which[start : start + PENALISED_AT_A_TIME], metadata, requests)
    return processed


def _mask(
    logits: torch.Tensor, record: RequestRecord, position: torch.Tensor, num_prompt_tokens: int, requests: RequestStates
) -> None:
    """Hide the tokens that a request does not want in its rows of `logits`, float32 `[num_draft + 1, vocab]`, in
    place. position: int64, of the first row."""
    if len(record.allowed_ids) > 0:
        hide_others(logits, record.allowed_ids)
    if record.bad_words is not None:
        record.bad_words.hide(logits, requests.state.tokens[record.index], position, num_prompt_tokens)


def _penalise(logits: torch.Tensor, which: np.ndarray, metadata: SamplingMetadata, requests: RequestStates) -> None:
    """Apply repetition, frequency and presence penalties, with vLLM's formulas, to `logits` (float32, in place), in
    the rows `which` of `metadata`, int64 `[n]` on the host."""
    device, vocab_size = logits.device, logits.shape[1]
    num_draft, index = metadata.num_draft[which], metadata.req_idx[which]
    host = np.stack([index, requests.num_prompt_tokens[index], which])
    req_idx, num_prompt, entry = put(host, device)
    position = metadata.position.index_select(0, entry)

    # Known tokens, counted once for each row.
    tokens = requests.state.tokens[:, : int(metadata.highest[which].max())].index_select(0, req_idx)
    column = torch.arange(tokens.shape[1], device=device)
    in_prompt = column < num_prompt[:, None]
    in_output = (column < position[:, None]) & ~in_prompt
    nothing = torch.zeros(len(which), vocab_size, device=device)
    prompted = nothing.scatter_add(1, tokens, in_prompt.float()) > 0
    known = nothing.scatter_add(1, tokens, in_output.float())

    # Then for each row of logits: the known tokens and the drafts before it.
    rows, numbers = spans(np.zeros_like(num_draft), num_draft + 1)
    logits_rows, drafts = spans(np.zeros_like(numbers), numbers)
    of_row, where = put(np.stack([rows, metadata.first[which][rows] + numbers]), device)
    of_draft, draft, draft_row = put(np.stack([logits_rows, drafts, rows[logits_rows]]), device)
    draft_position = (position.index_select(0, draft_row) + draft).clamp(max=requests.state.max_len - 1)
    draft_tokens = requests.state.tokens[req_idx.index_select(0, draft_row), draft_position]
    counts = known.index_select(0, of_row)
    counts.index_put_((of_draft, draft_tokens), counts.new_ones(()), accumulate=True)

    penalties = put(requests.penalties[index], device).index_select(0, of_row)
    repetition, frequency, presence = penalties[:, :, None].unbind(1)
    values = logits.index_select(0, where)
    in_output_now = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(prompted.index_select(0, of_row) | in_output_now, repeated, values)
    logits.index_copy_(0, where, values - frequency * counts - presence * in_output_now)
