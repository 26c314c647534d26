"""Log-probabilities of a prompt's tokens: the logits of the positions that a prefill chunk computes, a few at a time.

A step needs logits only of the tokens that it samples from. For a request that wants to know of its prompt those of
all other positions of its chunk follow, and are reduced at once: only a part of them is ever in memory.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import TargetModel
from dflash_backend.worker.batch import HostBatch
from dflash_backend.worker.logprobs import logprobs_entry, ranked_logprobs, unpacked_logprobs
from dflash_backend.worker.state import RequestStates

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
