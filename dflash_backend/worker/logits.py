"""What requests change in the target's logits, and what they want to know of them. Called by `worker.acceptance` and
`worker.device_special`.

The order is vLLM v1's. Log-probabilities are those of the logits as the model gave them. Then come logit bias, stop
tokens hidden before `min_tokens`, and penalties, which is `adjust`; temperature and the cuts of the tail follow in
`sampling.filtering`.

Rows are ragged, as in `sampling.verify`: a row with j drafts has j + 1 distributions behind one another, and the one
after d1 .. di counts d1 .. di as output. So a draft is judged by the distribution that the target alone would have had
at its place (LOSSLESS). Nothing is kept from step to step: everything follows from the tokens in the request table, so
preemption and prefix hits have nothing to restore.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.worker.batch import spans
from dflash_backend.worker.request_table import RequestArrays

# Penalties work on tensors of `[distributions, vocab]`. With 16 distributions a row and 150,000 tokens, 8 rows are
# 80 MB for each of them.
PENALISED_ROWS_AT_A_TIME = 8


@dataclass(frozen=True)
class JudgedRows:
    """Rows that choose tokens, int64 `[n]` each but the ids: row in the request table, position of the token that the
    first distribution decides, number of drafts."""

    request_ids: list[str]
    table: np.ndarray
    position: np.ndarray
    num_draft: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """Index of each row's first distribution: int64 `[n]`."""
        sizes = self.num_draft + 1
        starts: np.ndarray = np.cumsum(sizes) - sizes
        return starts


def adjust(logits: torch.Tensor, rows: JudgedRows, requests: RequestArrays) -> torch.Tensor:
    """The logits that `rows` choose from.

    logits: `[sum(num_draft + 1), vocab]`, not changed. Returns `logits` itself when no row asks for a change, else a
    float32 copy, in which the other rows have their values.
    """
    table, position, num_draft = rows.table, rows.position, rows.num_draft
    num_hidden = requests.min_end[table] - position
    biased, penalised = requests.biased[table], requests.penalised[table]
    special = (num_hidden > 0) | biased
    if not (special | penalised).any():
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    first = rows.first
    for i in special.nonzero()[0].tolist():
        record = requests.records[rows.request_ids[i]]
        part = adjusted[first[i] : first[i] + num_draft[i] + 1]
        if biased[i]:
            part.index_add_(1, record.bias_ids, record.bias.expand(len(part), -1))
        if num_hidden[i] > 0:
            part[: num_hidden[i]].index_fill_(1, record.stop_ids, float("-inf"))
    which = penalised.nonzero()[0]
    for start in range(0, len(which), PENALISED_ROWS_AT_A_TIME):
        group = which[start : start + PENALISED_ROWS_AT_A_TIME]
        _penalise(adjusted, first[group], num_draft[group], position[group], table[group], requests)
    return adjusted


def _penalise(
    logits: torch.Tensor,
    first: np.ndarray,
    num_draft: np.ndarray,
    position: np.ndarray,
    table: np.ndarray,
    requests: RequestArrays,
) -> None:
    """Apply repetition, frequency and presence penalties, with vLLM's formulas, to `logits` (float32, in place).

    Host arrays, int64 `[n]`, one entry for each row: first (its first distribution in `logits`), num_draft, position
    (of the token that this distribution decides), table (its row in the request table).
    """
    device, vocab_size = logits.device, logits.shape[1]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    # Known tokens, counted once for each row.
    tokens = requests.tokens[put(table), : int(position.max())]
    column = torch.arange(tokens.shape[1], device=device)
    in_prompt = column < put(requests.num_prompt_tokens[table])[:, None]
    in_output = (column < put(position)[:, None]) & ~in_prompt
    nothing = torch.zeros(len(table), vocab_size, device=device)
    prompted = nothing.scatter_add(1, tokens, in_prompt.float()) > 0
    known = nothing.scatter_add(1, tokens, in_output.float())

    # Then for each distribution: the known tokens and the drafts before it.
    rows, flat = spans(first, num_draft + 1)
    distributions, drafts = spans(np.zeros_like(flat), flat - first[rows])
    draft_rows = rows[distributions]
    draft_tokens = requests.tokens[put(table[draft_rows]), put(position[draft_rows] + drafts)]
    of_row = put(rows)
    counts = known[of_row]
    counts.index_put_((put(distributions), draft_tokens), counts.new_ones(()), accumulate=True)

    repetition, frequency, presence = put(requests.penalties[table])[of_row, :, None].unbind(1)
    where = put(flat)
    values = logits[where]
    in_output_now = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(prompted[of_row] | in_output_now, repeated, values)
    logits[where] = values - frequency * counts - presence * in_output_now


def token_logprobs(
    logits: torch.Tensor, rows: JudgedRows, requests: RequestArrays, new_tokens: list[list[int]]
) -> list[list[TokenLogprobs] | None]:
    """Log-probabilities of each row's new tokens, and of the most likely ones beside them; None for rows that did not
    ask.

    logits: `[sum(num_draft + 1), vocab]`, as the model gave them. new_tokens: the accepted drafts of each row and
    the token that follows, so at most num_draft + 1.
    """
    wanted = requests.num_logprobs[rows.table]
    asking = (wanted >= 0).nonzero()[0]
    results: list[list[TokenLogprobs] | None] = [None] * len(rows.table)
    if len(asking) == 0:
        return results
    _, flat = spans(rows.first[asking], np.array([len(new_tokens[i]) for i in asking]))
    chosen = torch.tensor([token for i in asking for token in new_tokens[i]], device=logits.device)[:, None]
    host = _ranked(logits[torch.from_numpy(flat).to(logits.device)], chosen, int(wanted.max()))
    entries = iter(zip(*host, strict=True))
    for i in asking.tolist():
        results[i] = [_entry(token, int(wanted[i]), *next(entries)) for token in new_tokens[i]]
    return results


def _ranked(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> tuple[list[float], list[int], list[list[float]], list[list[int]]]:
    """For `logits` `[n, vocab]` and chosen tokens int64 `[n, 1]`: each chosen one's log-probability and rank, and the
    log-probabilities and ids of the `num_top` most likely tokens, the best first."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, chosen)
    rank = (logprobs >= own).sum(dim=1, keepdim=True)
    top, top_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    # Side by side, for one copy to the host; float64 holds ids and float32 values exactly.
    packed = torch.cat([part.double() for part in (own, rank, top, top_ids)], dim=1).cpu().numpy()
    own_host, rank_host, top_host, ids_host = np.split(packed, [1, 2, 2 + top.shape[1]], axis=1)
    return (
        own_host[:, 0].tolist(),
        rank_host[:, 0].astype(np.int64).tolist(),
        top_host.tolist(),
        ids_host.astype(np.int64).tolist(),
    )


def _entry(
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
