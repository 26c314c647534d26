"""Logits processors: what requests change in the target's logits.

The order is vLLM v1's. Log-probabilities (`logprobs`) are those of the logits as the model gave them. Then come tokens
hidden by `allowed_token_ids` and `bad_words`, logit bias, stop tokens hidden before `min_tokens`, and penalties;
temperature and filters follow in `StepOps.target_tokens`.

A row with j drafts has j + 1 rows of logits behind one another, and the one after d1 .. di counts d1 .. di as output.
So a draft is compared with the token that the target alone would have given at its position (LOSSLESS). What is kept
from step to step are counts of final tokens, which only grow, and begin anew when a request is taken in: preemption and
prefix hits have nothing to restore, and a row may begin where only the device knows, behind a step in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.logprobs import PendingLogprobs, ranked_logprobs
from dflash_backend.worker.state import RequestRecord, RequestStates
from dflash_backend.worker.step_ops import StepOps
from dflash_backend.worker.token_masks import hide_others
from dflash_backend.worker.transfers import put
from dflash_kernels.penalties import PenalisedRows


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows that sample, `[n]` each but the ids. On the host: req_idx, num_draft int64, index of the request's state and
    number of drafts; lowest int64, the least that `position` may be. On the device: position int64, of the token that
    the first row of logits decides."""

    request_ids: list[str]
    req_idx: np.ndarray
    num_draft: np.ndarray
    lowest: np.ndarray
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
        return cls(ids, req_idx, batch.num_draft[rows], highest - unverified, position)

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

    def apply(self, logits: torch.Tensor, ops: StepOps) -> torch.Tensor:
        """The logits that tokens are chosen from, for those that the model gave, both `[D, vocab]`."""
        self._raw = logits.index_select(0, self.flat)
        processed = apply_processors(self._raw, self.metadata, self._requests, ops)
        if processed is self._raw:
            return logits
        return logits.float().index_copy(0, self.flat, processed)

    def processed(self, logits: torch.Tensor, ops: StepOps) -> torch.Tensor:
        """What `apply` gives of these rows alone, which may be changed: `[sum(num_draft + 1), vocab]`."""
        own = logits.index_select(0, self.flat)
        return apply_processors(own, self.metadata, self._requests, ops)

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


def apply_processors(
    logits: torch.Tensor, metadata: SamplingMetadata, requests: RequestStates, ops: StepOps
) -> torch.Tensor:
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
    if penalised.any():
        _penalise(processed, penalised.nonzero()[0], metadata, requests, ops)
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


def _penalise(
    logits: torch.Tensor, which: np.ndarray, metadata: SamplingMetadata, requests: RequestStates, ops: StepOps
) -> None:
    """Apply penalties to `logits` (float32, in place), in the rows `which` of `metadata`, int64 `[n]` on the host."""
    index, num_draft = metadata.req_idx[which], metadata.num_draft[which]
    numbers = np.stack([index, which, requests.num_prompt_tokens[index], num_draft, metadata.first[which]])
    rows = PenalisedRows(put(numbers, requests.device), metadata.position, int(num_draft.max()))
    ops.penalise(logits, rows, requests.state)
