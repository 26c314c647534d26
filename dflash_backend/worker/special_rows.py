"""The rows of a padded step whose requests ask for more than a graph does: penalties, biases, hidden tokens, grammars,
log-probabilities.

A padded step is two graphs (`graphs`): up to the target's own tokens, and from them on. Between the two the tokens of
special rows are chosen once more, from their own logits, by a few launches that touch no other row. So no request takes
another one out of its graph, and masks of grammars are filled while the first graph runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dflash_backend.worker.batch import HostBatch, spans
from dflash_backend.worker.grammars import StepGrammars
from dflash_backend.worker.logits import LogitsProcessors, special_rows
from dflash_backend.worker.logprobs import PendingLogprobs
from dflash_backend.worker.state import RequestStates
from dflash_backend.worker.step_ops import StepOps
from dflash_backend.worker.transfers import put


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
