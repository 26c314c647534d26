"""What a request may ask of its logits beyond temperature and filters: penalties, biases, hidden tokens, grammars, and
log-probabilities of its own tokens and of its prompt's.

A padded step is two graphs (`graphs`): up to the target's own tokens, and from them on. Between the two the tokens of
special rows are chosen once more, from their own logits, by a few launches that touch no other row. So no request takes
another one out of its graph, and masks of grammars are filled while the first graph runs. Log-probabilities of a prompt
take the logits of positions that no token is sampled from: a few at a time, reduced at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import TargetModel
from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.grammars import StepGrammars
from dflash_backend.worker.state import RequestRecord, RequestStates, hide_others
from dflash_backend.worker.step_ops import StepOps
from dflash_backend.worker.transfers import Download, fetch, put
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


Ranked = tuple[list[float], list[int], list[list[float]], list[list[int]]]


@dataclass(frozen=True)
class PendingLogprobs:
    """The log-probabilities of some rows of a step, on their way to the host: `packed`, of `ranked_logprobs`. Of each
    row that asked: its number, its tokens there, and how many likely ones it wants."""

    packed: Download
    rows: list[int]
    lens: list[int]
    num_top: list[int]

    @classmethod
    def begin(cls, packed: torch.Tensor, rows: list[int], lens: list[int], num_top: list[int]) -> PendingLogprobs:
        """Queue the copy of `packed` to the host."""
        return cls(fetch(packed), rows, lens, num_top)

    def entries(self, tokens: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
        """By row, those of its new tokens; waits until they are there. tokens: the new ones of each row of the step, at
        most as many as it has here."""
        packed = self.packed.wait()
        found: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for row, length, num_top in zip(self.rows, self.lens, self.num_top, strict=True):
            new = tokens[row]
            ranked = zip(*unpacked_logprobs(packed[first : first + len(new)]), strict=True)
            found[row] = [logprobs_entry(token, num_top, *next(ranked)) for token in new]
            first += length
        return found


def ranked_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> torch.Tensor:
    """For `logits` `[n, vocab]` and chosen tokens int64 `[n, 1]`: each chosen one's log-probability and rank, and the
    log-probabilities and ids of the `num_top` most likely tokens, the best first, the lowest id among equals: which
    ones a request gets does not depend on how many its neighbours ask for. Side by side, float64 `[n, 2 + 2 * top]`."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs >= own).sum(dim=1, keepdim=True)
    top_ids = most_likely(logprobs, min(num_top, logits.shape[1]))
    top = logprobs.gather(1, top_ids)
    # For one copy to the host; float64 holds ids and float32 values exactly.
    return torch.cat([part.double() for part in (own, rank, top, top_ids)], dim=1)


def unpacked_logprobs(packed: np.ndarray) -> Ranked:
    """The parts of `ranked_logprobs` on the host."""
    num_top = (packed.shape[1] - 2) // 2
    own, rank, top, ids = np.split(packed, [1, 2, 2 + num_top], axis=1)
    return own[:, 0].tolist(), rank[:, 0].astype(np.int64).tolist(), top.tolist(), ids.astype(np.int64).tolist()


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


class SpecialRows:
    """Those of a step whose rows all verify the drafts that the host knows of, and whose logits lie behind one another
    in the order of the rows."""

    def __init__(self, batch: HostBatch, requests: RequestStates, grammars: StepGrammars | None) -> None:
        """To be made before the step changes the requests' state. There is at least one special row."""
        rows = special_rows(batch, requests)
        if grammars is not None:
            rows = np.union1d(rows, _sampling(batch, grammars.answers))
        self._grammars = grammars
        self._processors = LogitsProcessors(batch, rows, requests)
        self._state = requests.state
        metadata = self._processors.metadata
        self._sampled = bool(requests.temperature[metadata.req_idx].any())
        row, number = spans(np.zeros_like(metadata.num_draft), metadata.num_draft + 1)
        of_row, number, req_idx = put(np.stack([row, number, metadata.req_idx[row]]), requests.device)
        self._req_idx = req_idx
        # Position of the token that each row of logits decides.
        self._positions = metadata.position.index_select(0, of_row) + number

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates, grammars: StepGrammars | None) -> SpecialRows | None:
        """Those of a step; None where there are none."""
        masked = grammars is not None and len(_sampling(batch, grammars.answers)) > 0
        return cls(batch, requests, grammars) if masked or len(special_rows(batch, requests)) else None

    def choose(self, logits: torch.Tensor, target_tokens: torch.Tensor, ops: StepOps) -> PendingLogprobs | None:
        """Put the tokens of these rows in place, once the masks of grammars are filled, and begin what they want to
        know. Nothing else is changed but these rows' `logits`.

        logits: `[D, vocab]`, as the target gave them. target_tokens: int64 `[D]`.
        """
        processors = self._processors
        processors.keep(logits)
        if self._grammars is not None and (masks := self._grammars.masks()) is not None:
            # Before the processors: what a mask hides stays hidden, whatever is added to it or counted.
            ops.apply_token_bitmask(logits, *masks)
        processed = processors.processed(logits, ops)
        tokens = ops.chosen_tokens(processed, self._req_idx, self._positions, self._state, self._sampled)
        target_tokens.index_copy_(0, processors.flat, tokens)
        return processors.logprobs(target_tokens)


def _sampling(batch: HostBatch, rows: Iterable[int]) -> np.ndarray:
    """Those of `rows` that sample, int64 `[n]`."""
    index = np.fromiter(rows, dtype=np.int64)
    sampling: np.ndarray = index[batch.sample[index]]
    return sampling


# Rows of logits at a time. With 150,000 tokens and float32 they are 20 MB.
POSITIONS_AT_A_TIME = 32


class PromptLogprobs:
    """The rows of a step that compute positions of a prompt whose request wants log-probabilities: `rows`, int64 `[n]`,
    at least one. `entries` has those of each row, by row, once they are computed: of the tokens that its positions
    predict, from the one behind its first position to the prompt's last token."""

    def __init__(self, batch: HostBatch, rows: np.ndarray, counts: np.ndarray, requests: RequestStates) -> None:
        lens = batch.query_lens
        self.rows = rows
        self.entries: dict[int, list[TokenLogprobs]] = {}
        self._first = (np.cumsum(lens) - lens)[rows]
        self._start = batch.start[rows]
        self._counts = counts[rows]
        self._req_idx = batch.req_idx[rows]
        self._num_top = requests.num_prompt_logprobs[self._req_idx]

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates) -> PromptLogprobs | None:
        """Those of a step; None where no row asks for any."""
        if not requests.num_processed:
            return None
        index = batch.req_idx
        # The last token of the prompt predicts the first of the output.
        counts = np.minimum(batch.num_new, requests.num_prompt_tokens[index] - 1 - batch.start)
        rows = ((requests.num_prompt_logprobs[index] >= 0) & (counts > 0)).nonzero()[0]
        return cls(batch, rows, counts, requests) if len(rows) else None

    def compute(self, hidden: torch.Tensor, target: TargetModel, tokens: torch.Tensor) -> None:
        """Fill `entries`; waits for the device. hidden: `[T, hidden]`, what the target's layers gave for the step's
        tokens. tokens: int64 `[S, max_len]`, those of all requests."""
        for i, row in enumerate(self.rows.tolist()):
            self.entries[row] = []
            for begin in range(0, int(self._counts[i]), POSITIONS_AT_A_TIME):
                self._add(row, i, begin, min(POSITIONS_AT_A_TIME, int(self._counts[i]) - begin), hidden, target, tokens)

    def _add(
        self, row: int, i: int, begin: int, count: int, hidden: torch.Tensor, target: TargetModel, tokens: torch.Tensor
    ) -> None:
        first = int(self._first[i]) + begin
        behind = int(self._start[i]) + begin + 1
        logits = target.logits(hidden[first : first + count])
        chosen = tokens[int(self._req_idx[i]), behind : behind + count]
        num_top = int(self._num_top[i])
        packed = ranked_logprobs(logits, chosen[:, None], num_top).cpu().numpy()
        host = zip(*unpacked_logprobs(packed), strict=True)
        for token, (own, rank, top, top_ids) in zip(chosen.tolist(), host, strict=True):
            self.entries[row].append(logprobs_entry(token, num_top, own, rank, top, top_ids))
