"""Logits processors and log-probabilities: what requests change in the target's logits, and what they want to know of
them.

The order is vLLM v1's. Log-probabilities are those of the logits as the model gave them. Then come tokens hidden by
`allowed_token_ids` and `bad_words`, logit bias, stop tokens hidden before `min_tokens`, and penalties; temperature and
filters follow in `StepOps.target_tokens`.

A row with j drafts has j + 1 rows of logits behind one another, and the one after d1 .. di counts d1 .. di as output.
So a draft is compared with the token that the target alone would have given at its position (LOSSLESS). Nothing is
kept from step to step: everything follows from the tokens in the requests' state, so preemption and prefix hits have
nothing to restore.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.state import RequestRecord, RequestStates
from dflash_backend.worker.token_masks import hide_others

# Penalties work on tensors of `[logits rows, vocab]`. With 16 rows of logits a request and 150,000 tokens, 8 requests
# are 80 MB for each of them.
PENALISED_AT_A_TIME = 8


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows that sample, int64 `[n]` each but the ids: index of the request's state, position of the token that the
    first row of logits decides, number of drafts."""

    request_ids: list[str]
    req_idx: np.ndarray
    position: np.ndarray
    num_draft: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """Index of each row's first logits: int64 `[n]`."""
        sizes = self.num_draft + 1
        starts: np.ndarray = np.cumsum(sizes) - sizes
        return starts


class LogitsProcessors:
    """The rows of a step whose requests change their logits, or want log-probabilities: `rows`, int64 `[n]`, at least
    one. The core plans such a row only when nothing of its request is in flight, so the host knows where it starts."""

    def __init__(self, batch: HostBatch, rows: np.ndarray, requests: RequestStates) -> None:
        self.rows = rows
        self._requests = requests
        num_logits = batch.num_logits
        first = np.cumsum(num_logits) - num_logits
        # The logits of these rows among those of the step, int64 `[sum(num_draft + 1)]`.
        _, self._flat = spans(first[rows], num_logits[rows])
        self._raw: torch.Tensor | None = None
        ids = [batch.request_ids[i] for i in rows.tolist()]
        position = batch.start[rows] + batch.num_new[rows]
        self._metadata = SamplingMetadata(ids, batch.req_idx[rows], position, batch.num_draft[rows])

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates) -> LogitsProcessors | None:
        """Those of a step; None where no row asks for any. Raises `RuntimeError` for a row whose start is not
        certain."""
        if not requests.num_processed:
            return None
        index = batch.req_idx
        # 0 for a request without `min_tokens`. The lowest start may then be below 0: an upper bound is cut at the
        # request's end, and the number of drafts in flight is not.
        min_end = requests.min_end[index]
        hides = (min_end > 0) & (min_end > batch.start + batch.num_new - batch.num_unverified)
        changes = hides | requests.biased[index] | requests.masked[index] | requests.penalised[index]
        asks = changes | (requests.num_logprobs[index] >= 0)
        rows = (batch.sample & asks).nonzero()[0]
        if len(rows) == 0:
            return None
        if batch.num_unverified[rows].any():
            names = [batch.request_ids[i] for i in rows.tolist()]
            raise RuntimeError(
                f"rows of {names} were planned with a step of theirs in flight, though their logits or their results "
                "need the host; this is a defect of the scheduler"
            )
        return cls(batch, rows, requests)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that tokens are chosen from, for those that the model gave, both `[D, vocab]`."""
        flat = torch.from_numpy(self._flat).to(logits.device)
        self._raw = logits.index_select(0, flat)
        processed = apply_processors(self._raw, self._metadata, self._requests)
        if processed is self._raw:
            return logits
        return logits.float().index_copy(0, flat, processed)

    def logprobs(self, counts: torch.Tensor, tokens: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """What the rows that asked get, by row, once the step has decided; waits for the device if any did.

        counts: int32 `[R]`, accepted drafts. tokens: int64 `[R, k + 1]`, new tokens.
        """
        if not (self._requests.num_logprobs[self._metadata.req_idx] >= 0).any():
            return {}
        assert self._raw is not None
        kept, ids = counts.tolist(), tokens.tolist()
        new = [ids[i][: kept[i] + 1] for i in self.rows.tolist()]
        entries = token_logprobs(self._raw, self._metadata, self._requests, new)
        return {row: entry for row, entry in zip(self.rows.tolist(), entries, strict=True) if entry is not None}


def apply_processors(logits: torch.Tensor, metadata: SamplingMetadata, requests: RequestStates) -> torch.Tensor:
    """The logits that the rows of `metadata` choose from.

    logits: `[sum(num_draft + 1), vocab]`, not changed. Returns `logits` itself when no row asks for a change, else a
    float32 copy, in which the other rows have their values.
    """
    req_idx, position, num_draft = metadata.req_idx, metadata.position, metadata.num_draft
    num_hidden = requests.min_end[req_idx] - position
    biased, penalised = requests.biased[req_idx], requests.penalised[req_idx]
    masked = requests.masked[req_idx]
    special = (num_hidden > 0) | biased | masked
    if not (special | penalised).any():
        return logits
    processed = logits.to(torch.float32, copy=True)
    first = metadata.first
    for i in special.nonzero()[0].tolist():
        record = requests.records[metadata.request_ids[i]]
        part = processed[first[i] : first[i] + num_draft[i] + 1]
        if masked[i]:
            _mask(part, record, int(position[i]), int(requests.num_prompt_tokens[req_idx[i]]), requests)
        if biased[i]:
            part.index_add_(1, record.bias_ids, record.bias.expand(len(part), -1))
        if num_hidden[i] > 0:
            part[: num_hidden[i]].index_fill_(1, record.stop_ids, float("-inf"))
    which = penalised.nonzero()[0]
    for start in range(0, len(which), PENALISED_AT_A_TIME):
        group = which[start : start + PENALISED_AT_A_TIME]
        _penalise(processed, first[group], num_draft[group], position[group], req_idx[group], requests)
    return processed


def _mask(
    logits: torch.Tensor, record: RequestRecord, position: int, num_prompt_tokens: int, requests: RequestStates
) -> None:
    """Hide the tokens that a request does not want in its rows of `logits`, float32 `[num_draft + 1, vocab]`, in
    place."""
    if len(record.allowed_ids) > 0:
        hide_others(logits, record.allowed_ids)
    if record.bad_words is not None:
        record.bad_words.hide(logits, requests.state.tokens[record.index], position, num_prompt_tokens)


def _penalise(
    logits: torch.Tensor,
    first: np.ndarray,
    num_draft: np.ndarray,
    position: np.ndarray,
    req_idx: np.ndarray,
    requests: RequestStates,
) -> None:
    """Apply repetition, frequency and presence penalties, with vLLM's formulas, to `logits` (float32, in place).

    Host arrays, int64 `[n]`, one entry for each row: first (its first row of logits), num_draft, position
    (of the token that these logits decide), req_idx (index of its request's state).
    """
    device, vocab_size = logits.device, logits.shape[1]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    # Known tokens, counted once for each row.
    tokens = requests.state.tokens[put(req_idx), : int(position.max())]
    column = torch.arange(tokens.shape[1], device=device)
    in_prompt = column < put(requests.num_prompt_tokens[req_idx])[:, None]
    in_output = (column < put(position)[:, None]) & ~in_prompt
    nothing = torch.zeros(len(req_idx), vocab_size, device=device)
    prompted = nothing.scatter_add(1, tokens, in_prompt.float()) > 0
    known = nothing.scatter_add(1, tokens, in_output.float())

    # Then for each row of logits: the known tokens and the drafts before it.
    rows, flat = spans(first, num_draft + 1)
    logits_rows, drafts = spans(np.zeros_like(flat), flat - first[rows])
    draft_rows = rows[logits_rows]
    draft_tokens = requests.state.tokens[put(req_idx[draft_rows]), put(position[draft_rows] + drafts)]
    of_row = put(rows)
    counts = known[of_row]
    counts.index_put_((put(logits_rows), draft_tokens), counts.new_ones(()), accumulate=True)

    repetition, frequency, presence = put(requests.penalties[req_idx])[of_row, :, None].unbind(1)
    where = put(flat)
    values = logits[where]
    in_output_now = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(prompted[of_row] | in_output_now, repeated, values)
    logits[where] = values - frequency * counts - presence * in_output_now


def token_logprobs(
    logits: torch.Tensor, metadata: SamplingMetadata, requests: RequestStates, new_tokens: list[list[int]]
) -> list[list[TokenLogprobs] | None]:
    """Log-probabilities of each row's new tokens, and of the most likely ones beside them; None for rows that did not
    ask.

    logits: `[sum(num_draft + 1), vocab]`, as the model gave them. new_tokens: the accepted drafts of each row and
    the token that follows, so at most num_draft + 1.
    """
    wanted = requests.num_logprobs[metadata.req_idx]
    asking = (wanted >= 0).nonzero()[0]
    results: list[list[TokenLogprobs] | None] = [None] * len(metadata.req_idx)
    if len(asking) == 0:
        return results
    _, flat = spans(metadata.first[asking], np.array([len(new_tokens[i]) for i in asking]))
    chosen = torch.tensor([token for i in asking for token in new_tokens[i]], device=logits.device)[:, None]
    host = ranked_logprobs(logits[torch.from_numpy(flat).to(logits.device)], chosen, int(wanted.max()))
    entries = iter(zip(*host, strict=True))
    for i in asking.tolist():
        results[i] = [logprobs_entry(token, int(wanted[i]), *next(entries)) for token in new_tokens[i]]
    return results


def ranked_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[list[float], list[int], list[list[float]], list[list[int]]]:
    """For `logits` `[n, vocab]` and chosen tokens int64 `[n, 1]`: each chosen one's log-probability and rank, and the
    log-probabilities and ids of the `num_top` most likely tokens, the best first, the lowest id among equals: which
    ones a request gets does not depend on how many its neighbours ask for."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs >= own).sum(dim=1, keepdim=True)
    top_ids = most_likely(logprobs, min(num_top, logits.shape[1]))
    top = logprobs.gather(1, top_ids)
    # Side by side, for one copy to the host; float64 holds ids and float32 values exactly.
    packed = torch.cat([part.double() for part in (own, rank, top, top_ids)], dim=1).cpu().numpy()
    own_host, rank_host, top_host, ids_host = np.split(packed, [1, 2, 2 + top.shape[1]], axis=1)
    return (
        own_host[:, 0].tolist(),
        rank_host[:, 0].astype(np.int64).tolist(),
        top_host.tolist(),
        ids_host.astype(np.int64).tolist(),
    )


def most_likely(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the largest `scores` (float32 `[n, vocab]`) of each row, the first among equals: int64
    `[n, count]`. `topk` gives equals in an order that depends on `count`."""
    bits = scores.view(torch.int32).long()
    # As integers in the order of the numbers; below each, the column, the lowest of which is the largest key.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    columns = torch.arange(scores.shape[1], device=scores.device)
    return (ordered * 2**32 - columns).topk(count, dim=1).indices


def logprobs_entry(
    token: int, num_top: int, own: float, rank: int, top_logprobs: list[float], top_ids: list[int]
) -> TokenLogprobs:
    """The message for one token. A chosen token among the most likely ones is not repeated, and has its place there."""
    entry = TokenLogprobs([token], [own], [rank])
    for place, (token_id, logprob) in enumerate(zip(top_ids[:num_top], top_logprobs, strict=False), start=1):
        if token_id == token:
            entry.ranks[0] = place
        else:
            entry.token_ids.append(token_id)
            entry.logprobs.append(logprob)
            entry.ranks.append(place)
    return entry
