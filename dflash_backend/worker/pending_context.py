"""Context KV that waits: on a CPU, a request that does not draft needs it only when a block is full, or when it drafts.

Injecting one token costs nearly as much as injecting sixteen, since the operations are small. So the features of a
request that decodes without drafting are kept until its tokens fill a block, which the prefix cache may then publish
(PUBLISH), or until it drafts again, and go to the drafter together. A request keeps less than a block.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch

from dflash_backend.drafters.base import ContextBatch
from dflash_backend.worker.batch import Step
from dflash_backend.worker.state import StateTensors
from dflash_kernels import one_row

# With more rows some of them fill a block in nearly every step, and to keep the others back takes as long as it saves.
MAX_WAITING_ROWS = 16
_INTEGERS = {2: torch.int16, 4: torch.int32}


class _Tokens(NamedTuple):
    """Tokens as arrays: features as integers of their size, `[n, L * hidden]`, since NumPy has no bfloat16 and takes a
    fraction of torch's time for a few rows; the rows, positions and slots `[n]`."""

    features: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, context: ContextBatch) -> _Tokens:
        """Those of a context; memory is shared."""
        assert context.token_row is not None
        rows = context.token_row.numpy()
        return cls(as_integers(context.features), rows, context.positions.numpy(), context.slots.numpy())

    def part(self, index: np.ndarray) -> _Tokens:
        """Those at these places."""
        return _Tokens(*(each[index] for each in self))

    def context(self, dtype: torch.dtype) -> ContextBatch:
        """As a context, of features in this dtype."""
        features, rows, positions, slots = map(torch.from_numpy, self)
        return ContextBatch(features.view(dtype), positions, slots, token_row=rows)


def as_integers(features: torch.Tensor) -> np.ndarray:
    """The same memory as integers of the same size."""
    return features.view(_INTEGERS[features.dtype.itemsize]).numpy()


class PendingContext:
    """The features that wait, by request index. The parts of a step may use it side by side: no two have a request in
    common.

    What waits of a request lies in one block: consecutive positions and slots, of which the first are known.
    """

    def __init__(self, num_requests: int, block_size: int) -> None:
        self._counts = np.zeros(num_requests, dtype=np.int64)
        self._positions = np.zeros(num_requests, dtype=np.int64)  # of the first token that waits
        self._slots = np.zeros(num_requests, dtype=np.int64)
        self._block_size = block_size
        # `[num_requests, block_size, L * hidden]`, once the width is known.
        self._features: np.ndarray | None = None
        self._lock = threading.Lock()

    def num_waiting(self, req_idx: int) -> int:
        """Tokens of a request that wait."""
        return self._counts.item(req_idx)

    def drop(self, req_idx: int) -> None:
        """Drop what waits of a request: its index goes to another."""
        self._counts[req_idx] = 0

    def clear(self) -> None:
        """Drop everything."""
        self._counts[:] = 0

    def keep_step(self, step: Step, features: torch.Tensor, state: StateTensors) -> bool:
        """Keep back the context of a whole step, after `accept`, if all of it can wait: what `exchange` would do, in a
        fraction of the time."""
        batch, num_rows = step.batch, step.batch.req_idx.numel()
        if not 0 < num_rows == batch.token_row.numel() <= MAX_WAITING_ROWS:
            return False
        if num_rows == 1:
            index = one_row.number(batch.req_idx)
            full = state.computed.numpy().item(index) % state.block_size == 0
            if full or one_row.number(batch.num_next):
                return False
            self._keep_token(index, as_integers(features), one_row.number(step.positions), one_row.number(step.slots))
            return True
        if batch.num_next.numpy().any():
            return False
        req_idx = batch.req_idx.numpy()
        if not (state.computed.numpy()[req_idx] % state.block_size).all():
            return False
        self._keep_one_each(req_idx, as_integers(features), step.positions.numpy(), step.slots.numpy())
        return True

    def exchange(self, context: ContextBatch, step: Step, state: StateTensors) -> ContextBatch:
        """Keep back what can wait of a step's `context`, and add what has waited and is needed now. After `accept`."""
        batch, req_idx = step.batch, step.batch.req_idx.numpy()
        counts = self._counts[req_idx]
        may_wait = len(req_idx) <= MAX_WAITING_ROWS
        if not may_wait and not counts.any():
            return context
        rests = (batch.num_next.numpy() == 0) & (batch.num_new.numpy() == 1) & may_wait
        if not rests.any() and not counts.any():
            return context
        # Where the block begins that is not full yet.
        tail = state.computed.numpy()[req_idx] // state.block_size * state.block_size
        is_full = self._positions[req_idx] < tail
        needed = [
            self._take(int(req_idx[row]), row) for row in ((counts > 0) & (is_full | ~rests)).nonzero()[0].tolist()
        ]
        tokens = _Tokens.of(context)
        keeps = rests[tokens.rows] & (tokens.positions >= tail[tokens.rows])
        if keeps.any():
            waits, tokens = tokens.part(keeps), tokens.part(~keeps)
            self._keep(waits, req_idx[waits.rows])
        elif not needed:
            return context
        joined = [np.concatenate(parts) for parts in zip(*needed, tokens, strict=True)] if needed else tokens
        return _Tokens(*joined).context(context.features.dtype)

    def _take(self, req_idx: int, row: int) -> _Tokens:
        """What a request has waiting, at least a token, as tokens of this row."""
        count, self._counts[req_idx] = self._counts.item(req_idx), 0
        assert self._features is not None
        steps = np.arange(count)
        positions, slots = self._positions[req_idx] + steps, self._slots[req_idx] + steps
        return _Tokens(self._features[req_idx, :count], np.full(count, row, dtype=np.int32), positions, slots)

    def _keep(self, tokens: _Tokens, req_idx: np.ndarray) -> None:
        """Keep tokens of the requests `req_idx`; those of one request follow each other."""
        if len(set(req_idx.tolist())) == len(req_idx):
            self._keep_one_each(req_idx, tokens.features, tokens.positions, tokens.slots)
            return
        for token, index in enumerate(req_idx.tolist()):
            self._keep_token(
                index, tokens.features[token : token + 1], tokens.positions.item(token), tokens.slots.item(token)
            )

    def _keep_token(self, req_idx: int, features: np.ndarray, position: int, slot: int) -> None:
        """Keep one token of one request; features `[1, L * hidden]`."""
        count = self._counts.item(req_idx)
        self._space(features)[req_idx, count] = features[0]
        if count == 0:
            self._positions[req_idx], self._slots[req_idx] = position, slot
        self._counts[req_idx] = count + 1

    def _keep_one_each(
        self, req_idx: np.ndarray, features: np.ndarray, positions: np.ndarray, slots: np.ndarray
    ) -> None:
        """Keep a token each of the requests `req_idx`, all distinct."""
        counts = self._counts[req_idx]
        self._space(features)[req_idx, counts] = features
        self._positions[req_idx] = np.where(counts == 0, positions, self._positions[req_idx])
        self._slots[req_idx] = np.where(counts == 0, slots, self._slots[req_idx])
        self._counts[req_idx] = counts + 1

    def _space(self, features: np.ndarray) -> np.ndarray:
        """Where features of this width wait. The system gives its memory as it is written."""
        if self._features is None:
            with self._lock:
                if self._features is None:
                    shape = len(self._counts), self._block_size, features.shape[1]
                    self._features = np.empty(shape, features.dtype)
        return self._features
