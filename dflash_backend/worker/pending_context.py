"""Context KV that waits: on a CPU, a request that does not draft needs it only when a block is full, or when it drafts.

Injecting one token costs nearly as much as injecting sixteen, since the operations are small. So the features of a
request that decodes without drafting are kept until its tokens fill a block, which the prefix cache may then publish
(PUBLISH), or until it drafts again, and go to the drafter together. A request keeps less than a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dflash_backend.worker.batch import DeviceBatch
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_tensors import FinalTokens, Prepared
from dflash_kernels import one_row

# With more rows some of them fill a block in nearly every step, and to keep the others back takes as long as it saves.
MAX_WAITING_ROWS = 16


class _Waiting(NamedTuple):
    """A token that waits: its features `[1, L * hidden]`, its position and slot int64 `[1]`."""

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Context:
    """What a step injects: features `[n, L * hidden]`; token_row int32 `[n]`, the row of each; `final` their positions
    and slots."""

    features: torch.Tensor
    token_row: torch.Tensor
    final: FinalTokens

    def part(self, index: torch.Tensor) -> Context:
        """Those of its tokens."""
        final = FinalTokens(self.final.positions[index], self.final.slots[index])
        return Context(self.features[index], self.token_row[index], final)


class PendingContext:
    """The features that wait, by request index. The parts of a step may use it side by side: no two have a request in
    common."""

    def __init__(self, num_requests: int) -> None:
        self._pending: list[list[_Waiting]] = [[] for _ in range(num_requests)]

    def num_waiting(self, req_idx: int) -> int:
        """Tokens of a request that wait."""
        return len(self._pending[req_idx])

    def drop(self, req_idx: int) -> None:
        """Drop what waits of a request: its index goes to another."""
        self._pending[req_idx] = []

    def clear(self) -> None:
        """Drop everything."""
        self._pending = [[] for _ in self._pending]

    def keep_step(self, features: torch.Tensor, batch: DeviceBatch, prepared: Prepared, state: StateTensors) -> bool:
        """Keep back the context of a whole step, after `accept`, if all of it can wait: what `exchange` would do, in a
        fraction of the time."""
        num_rows = batch.req_idx.numel()
        if not 0 < num_rows == batch.token_row.numel() <= MAX_WAITING_ROWS:
            return False
        if num_rows == 1:
            index = one_row.number(batch.req_idx)
            full = state.computed.numpy().item(index) % state.block_size == 0
            if full or one_row.number(batch.num_next):
                return False
            self._pending[index].append(_Waiting(features, prepared.positions, prepared.slots))
            return True
        if batch.num_next.numpy().any():
            return False
        req_idx = batch.req_idx.numpy()
        if not (state.computed.numpy()[req_idx] % state.block_size).all():
            return False
        self._keep(features, prepared.positions, prepared.slots, req_idx.tolist())
        return True

    def exchange(self, context: Context, batch: DeviceBatch, state: StateTensors) -> Context:
        """Keep back what can wait of a step's `context`, and add what has waited and is needed now. After `accept`."""
        req_idx = batch.req_idx.numpy()
        rests = (batch.num_next.numpy() == 0) & (batch.num_new.numpy() == 1) & (len(req_idx) <= MAX_WAITING_ROWS)
        waiting = [row for row, index in enumerate(req_idx.tolist()) if self._pending[index]]
        if not waiting and not rests.any():
            return context
        # Where the block begins that is not full yet.
        tail = state.computed.numpy()[req_idx] // state.block_size * state.block_size
        needed = [
            (row, token)
            for row in waiting
            for token in self._take(int(req_idx[row]), int(tail[row]) if rests[row] else None)
        ]
        rows = context.token_row.numpy()
        keeps = rests[rows] & (context.final.positions.numpy() >= tail[rows])
        if keeps.any():
            kept = keeps.nonzero()[0]
            # A copy of these features: views would hold those of the whole step.
            waits = context.part(torch.from_numpy(kept))
            self._keep(waits.features, waits.final.positions, waits.final.slots, req_idx[rows[kept]].tolist())
            context = context.part(torch.from_numpy((~keeps).nonzero()[0]))
        return _joined(context, needed) if needed else context

    def _take(self, req_idx: int, tail: int | None) -> list[_Waiting]:
        """What a request has waiting, if the block is full that it lies in, the one that is not beginning at `tail`;
        with None in any case."""
        tokens = self._pending[req_idx]
        if tail is not None and tokens[0].positions.item() >= tail:
            return []
        self._pending[req_idx] = []
        return tokens

    def _keep(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, req_idx: list[int]) -> None:
        """Keep tokens, of the requests `req_idx`."""
        columns = zip(req_idx, features.split(1), positions.split(1), slots.split(1), strict=True)
        for request, *token in columns:
            self._pending[request].append(_Waiting(*token))


def _joined(context: Context, needed: list[tuple[int, _Waiting]]) -> Context:
    """A context, and tokens of its rows that waited, at least one, in front of it."""
    rows = torch.tensor([row for row, _ in needed], dtype=torch.int32)
    features, positions, slots = zip(*(token for _, token in needed), strict=True)
    final = context.final
    return Context(
        torch.cat([*features, context.features]),
        torch.cat([rows, context.token_row]),
        FinalTokens(torch.cat([*positions, final.positions]), torch.cat([*slots, final.slots])),
    )
