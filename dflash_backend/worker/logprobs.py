"""Log-probabilities of chosen tokens and of the most likely ones beside them: found on the device, brought to the host
with the step's results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.worker.transfers import Download, fetch

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
