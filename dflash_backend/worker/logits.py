"""What a request may ask of its logits beyond temperature and filters: penalties, biases, hidden tokens, grammars, and
log-probabilities of its own tokens and of its prompt's.

A padded step is three graphs (`graphs`), the first of which ends with the target's own tokens. Before the second the
tokens of special rows are chosen once more, from their own logits, by a few launches that touch no other row. So no
request takes another one out of its graph, and masks of grammars are filled while the first graph runs.
Log-probabilities of a prompt take the logits of positions that no token is sampled from: a few at a time, reduced at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from dflash_backend.attention.packed_queries import to_device
from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import TargetModel
from dflash_backend.worker.batch import ForwardBatch, HostBatch, spans
from dflash_backend.worker.grammars import StepGrammars
from dflash_backend.worker.state import RequestStates
from dflash_backend.worker.step_ops import StepOps
from dflash_backend.worker.transfers import Download, fetch
from dflash_kernels.penalties import PenalisedRows


class SpecialRows:
    """The rows of a step whose requests ask for more than the target's logits, temperature and filters decide: hidden
    tokens, biases, penalties, grammars, log-probabilities. At least one. They verify the drafts that the host knows of,
    and the logits of a step's rows lie behind one another in the order of the rows.

    rows: int64 `[n]`. On the host, `[n]` each: req_idx, num_draft int64, index of the request's state and number of
    drafts; first int64, the first of the row's logits among those of these rows; lowest int64, the least that
    `position` may be. On the device: position int64, of the token that the first row of logits decides; flat int64
    `[sum(num_draft + 1)]`, the logits of these rows among those of the step.
    """

    def __init__(
        self, batch: HostBatch, requests: RequestStates, grammars: StepGrammars | None, rows: np.ndarray
    ) -> None:
        """To be made before the step changes the requests' state. rows: int64 `[n]`, their numbers in the step."""
        self.rows = rows
        self._requests, self._grammars = requests, grammars
        self._request_ids = [batch.request_ids[i] for i in rows.tolist()]
        self.req_idx, self.num_draft = batch.req_idx[rows], batch.num_draft[rows]
        sizes = self.num_draft + 1
        self.first = np.cumsum(sizes) - sizes
        num_logits = batch.num_logits
        _, flat = spans((np.cumsum(num_logits) - num_logits)[rows], sizes)
        start, num_new, unverified = batch.start_bound[rows], batch.num_new[rows], batch.num_unverified_drafts[rows]
        self.lowest = start + num_new - unverified
        row, number = spans(np.zeros_like(sizes), sizes)
        self.flat, of_row, number, self._req_idx = to_device(
            np.stack([flat, row, number, self.req_idx[row]]), requests.device
        )
        highest, new, in_flight, index = to_device(
            np.stack([start + num_new, num_new, unverified, self.req_idx]), requests.device
        )
        # The same choice as that of `prepare_step`.
        starts = requests.state.computed.index_select(0, index) + new
        self.position = torch.where(in_flight > 0, starts, highest)
        self._positions = self.position.index_select(0, of_row) + number
        self._sampled = bool(requests.temperature[self.req_idx].any())
        self._num_top = requests.num_logprobs[self.req_idx]
        index = self.req_idx
        self._hides, self._biased = hides_stops(requests, index, self.lowest), requests.biased[index]
        self._masked, self._penalised = requests.masked[index], requests.penalised[index]
        self._changes = bool((self._hides | self._biased | self._masked | self._penalised).any())
        # Whether no token of the step is chosen elsewhere.
        self.replaces_all = self._changes and len(flat) == int(num_logits.sum())
        self._raw: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates, grammars: StepGrammars | None) -> SpecialRows | None:
        """Those of a step; None where there are none."""
        rows = special_rows(batch, requests)
        if grammars is not None:
            with_grammar = np.fromiter(grammars.answers, dtype=np.int64)
            rows = np.union1d(rows, with_grammar[batch.sample[with_grammar]])
        return cls(batch, requests, grammars, rows) if len(rows) else None

    def choose(self, step: ForwardBatch, ops: StepOps) -> None:
        """Put the tokens of these rows in their places among `step.target_tokens`, once the masks of grammars are
        filled. Nothing else is changed but these rows' logits."""
        if step.logits is None:
            return
        logits = step.logits
        if (self._num_top >= 0).any():
            self._raw = logits.index_select(0, self.flat)
        # Masks come before the processors: what they hide stays hidden, whatever is added to it or counted.
        masks = None if self._grammars is None else self._grammars.masks()
        if masks is not None or self._changes:
            self._choose(logits, step.target_tokens, masks, ops)
        if self._grammars is not None and (missing := self._grammars.missing_masks(step.target_tokens)) is not None:
            self._choose(logits, step.target_tokens, missing, ops)

    def _choose(
        self,
        logits: torch.Tensor,
        target_tokens: torch.Tensor,
        masks: tuple[torch.Tensor, torch.Tensor] | None,
        ops: StepOps,
    ) -> None:
        if masks is not None:
            ops.apply_token_bitmask(logits, *masks)
        processed = self.processed(logits.index_select(0, self.flat), ops)
        tokens = ops.chosen_tokens(processed, self._req_idx, self._positions, self._requests.state, self._sampled)
        target_tokens.index_copy_(0, self.flat, tokens)

    def processed(self, logits: torch.Tensor, ops: StepOps) -> torch.Tensor:
        """The logits that these rows choose from, for those that the target gave, `[sum(num_draft + 1), vocab]`, which
        are not changed: the same where no row asks for a change, else a float32 copy."""
        if not self._changes:
            return logits
        requests, req_idx = self._requests, self.req_idx
        hides, biased, masked, penalised = self._hides, self._biased, self._masked, self._penalised
        processed = logits.to(torch.float32, copy=True)
        for i in (hides | biased | masked).nonzero()[0].tolist():
            record, index = requests.records[self._request_ids[i]], int(req_idx[i])
            part = processed[self.first[i] : self.first[i] + self.num_draft[i] + 1]
            if masked[i]:
                if len(record.allowed_ids) > 0:  # all others are hidden
                    kept = part.index_select(1, record.allowed_ids)
                    part.fill_(float("-inf")).index_copy_(1, record.allowed_ids, kept)
                if record.bad_words is not None:
                    tokens, num_prompt = requests.state.tokens[record.index], int(requests.num_prompt_tokens[index])
                    record.bad_words.hide(part, tokens, self.position[i], num_prompt)
            if biased[i]:
                part.index_add_(1, record.bias_ids, record.bias.expand(len(part), -1))
            if hides[i]:
                positions = self.position[i] + torch.arange(len(part), device=part.device)
                early = (positions < int(requests.min_end[index]))[:, None]
                stops = part.index_select(1, record.stop_ids).masked_fill(early, float("-inf"))
                part.index_copy_(1, record.stop_ids, stops)
        if penalised.any():
            self._penalise(processed, penalised.nonzero()[0], ops)
        return processed

    def _penalise(self, logits: torch.Tensor, which: np.ndarray, ops: StepOps) -> None:
        """Apply penalties to `logits` (float32, in place) of `which` of these rows, int64 on the host."""
        index, num_draft = self.req_idx[which], self.num_draft[which]
        num_prompt = self._requests.num_prompt_tokens[index]
        numbers = to_device(np.stack([index, which, num_prompt, num_draft, self.first[which]]), self._requests.device)
        rows = PenalisedRows(numbers, self.position, int(num_draft.max()))
        ops.penalise(logits, rows, self._requests.state)

    def logprobs(self, step: ForwardBatch, ops: StepOps) -> PendingLogprobs | None:
        """What the rows that asked get; None where none asked. On a CPU after `accept`. On a GPU nothing waits for the
        device: all drafts of the rows have log-probabilities, of which `PendingLogprobs.entries` leaves out those of
        rejected ones. Accepted drafts are the target's own tokens, and so is the one that follows them."""
        asking = (self._num_top >= 0).nonzero()[0]
        if self._raw is None or not len(asking):
            return None
        accepted = self.num_draft[asking]
        if ops.on_host:
            accepted = step.num_accepted.numpy()[self.rows[asking]].astype(np.int64)
        lens = accepted + 1
        _, flat = spans(self.first[asking], lens)
        index = to_device(flat, self._raw.device)
        chosen = step.target_tokens.index_select(0, self.flat.index_select(0, index))
        raw, self._raw = self._raw.index_select(0, index), None
        records = [self._requests.records[self._request_ids[i]] for i in asking.tolist()]
        named = [list(record.sampling.logprob_token_ids) for record in records]
        rows, num_top = self.rows[asking].tolist(), self._num_top[asking].tolist()
        return PendingLogprobs.of(raw, chosen, rows, lens.tolist(), num_top, named, ops)


def hides_stops(requests: RequestStates, req_idx: np.ndarray, lowest: np.ndarray) -> np.ndarray:
    """Which rows hide stop tokens, whose first logits decide position `lowest` at the least: bool `[n]`."""
    # 0 for a request without `min_tokens`. The lowest start may then be below 0: an upper bound is cut at the
    # request's end, and the number of drafts in flight is not.
    min_end = requests.min_end[req_idx]
    hides: np.ndarray = (min_end > 0) & (min_end > lowest)
    return hides


def special_rows(batch: HostBatch, requests: RequestStates) -> np.ndarray:
    """The rows that sample and whose requests change their logits or want log-probabilities: int64 `[n]`."""
    index = batch.req_idx
    hides = hides_stops(requests, index, batch.start_bound + batch.num_new - batch.num_unverified_drafts)
    changes = hides | requests.biased[index] | requests.masked[index] | requests.penalised[index]
    asks = changes | (requests.num_logprobs[index] >= 0)
    rows: np.ndarray = (batch.sample & asks).nonzero()[0]
    return rows


@dataclass(frozen=True)
class PendingLogprobs:
    """The log-probabilities of some rows of a step, on their way to the host: `packed`, of `ranked_logprobs`, of the
    `num_ids` tokens that were asked for and the most likely ones. Of each row that asked: its number, its tokens there,
    how many likely ones it wants, and the tokens that it names."""

    packed: Download
    num_ids: int
    rows: list[int]
    lens: list[int]
    num_top: list[int]
    named: list[list[int]]

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        rows: list[int],
        lens: list[int],
        num_top: list[int],
        named: list[list[int]],
        ops: StepOps,
    ) -> PendingLogprobs:
        """Compute them, and queue their copy to the host. logits: `[sum(lens), vocab]`, of which int64 `chosen` are
        the tokens."""
        ids = chosen[:, None]
        if any(named):
            of_rows, begins = np.zeros((len(logits), max(map(len, named))), dtype=np.int64), 0
            for own, length in zip(named, lens, strict=True):
                of_rows[begins : begins + length, : len(own)] = own
                begins += length
            ids = torch.cat([ids, to_device(of_rows, logits.device)], dim=1)
        packed = fetch(ops.ranked_logprobs(logits, ids, max(num_top)))
        return cls(packed, ids.shape[1], rows, lens, num_top, named)

    def entries(self, tokens: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
        """By row, those of its new tokens; waits until they are there. tokens: the new ones of each row of the step, at
        most as many as it has here."""
        packed, first = self.packed.wait(), 0
        found: dict[int, list[TokenLogprobs]] = {}
        for row, length, num_top, named in zip(self.rows, self.lens, self.num_top, self.named, strict=True):
            new = tokens[row]
            found[row] = logprobs_entries(new, packed[first : first + len(new)], self.num_ids, num_top, named)
            first += length
        return found


def logprobs_entries(
    tokens: list[int], packed: np.ndarray, num_ids: int, num_top: int, named: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """The messages for these tokens, each of which is the first of the `num_ids` ids of its row of `packed`, of
    `ranked_logprobs`, and `named` the next ones. A token among the most likely ones is not repeated, and has its place
    there; nor is it where it is named."""
    num_likely = packed.shape[1] // 2 - num_ids
    own, ranks, top, top_ids = np.split(packed, [num_ids, 2 * num_ids, 2 * num_ids + num_likely], axis=1)
    likely = zip(top_ids[:, :num_top].astype(np.int64).tolist(), top[:, :num_top].tolist(), strict=True)
    values = zip(own.tolist(), ranks.astype(np.int64).tolist(), strict=True)
    entries = []
    for token, (of_ids, of_ranks), (ids, logprobs) in zip(tokens, values, likely, strict=True):
        entry = TokenLogprobs([token], of_ids[:1], of_ranks[:1])
        others = [*zip(ids, logprobs, count(1), strict=False), *zip(named, of_ids[1:], of_ranks[1:], strict=False)]
        for token_id, logprob, rank in others:
            if token_id != token:
                entry.token_ids.append(token_id)
                entry.logprobs.append(logprob)
                entry.ranks.append(rank)
        if token in ids:
            entry.ranks[0] = ids.index(token) + 1
        entries.append(entry)
    return entries


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
        self._start = batch.start_bound[rows]
        self._counts = counts[rows]
        self._req_idx = batch.req_idx[rows]
        self._num_top = requests.num_prompt_logprobs[self._req_idx]

    @classmethod
    def of(cls, batch: HostBatch, requests: RequestStates) -> PromptLogprobs | None:
        """Those of a step; None where no row asks for any."""
        index = batch.req_idx
        # The last token of the prompt predicts the first of the output.
        counts = np.minimum(batch.num_new, requests.num_prompt_tokens[index] - 1 - batch.start_bound)
        rows = ((requests.num_prompt_logprobs[index] >= 0) & (counts > 0)).nonzero()[0]
        return cls(batch, rows, counts, requests) if len(rows) else None

    def compute(self, hidden: torch.Tensor, target: TargetModel, tokens: torch.Tensor, ops: StepOps) -> None:
        """Fill `entries`; waits for the device. hidden: `[T, hidden]`, what the target's layers gave for the step's
        tokens. tokens: int64 `[S, max_len]`, those of all requests."""
        for i, row in enumerate(self.rows.tolist()):
            self.entries[row] = []
            num_top, own, first = int(self._num_top[i]), tokens[int(self._req_idx[i])], int(self._first[i])
            for begin in range(0, int(self._counts[i]), POSITIONS_AT_A_TIME):
                end = min(begin + POSITIONS_AT_A_TIME, int(self._counts[i]))
                logits = target.logits(hidden[first + begin : first + end])
                chosen = own[int(self._start[i]) + begin + 1 : int(self._start[i]) + end + 1]
                packed = ops.ranked_logprobs(logits, chosen[:, None], num_top).cpu().numpy()
                self.entries[row] += logprobs_entries(chosen.tolist(), packed, 1, num_top)
