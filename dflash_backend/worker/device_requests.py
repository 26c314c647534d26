"""Keeps the device's request state in step with the plans: new requests, new blocks, finished ones. Used by the device
runner.

What changes is sent as one copy and put in its place by the device, behind the steps that it has yet to run. So a row
that a finished request leaves can be given away at once: the steps in flight that still read it run first.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.core.plan import NewRequest, StepPlan
from dflash_backend.worker.device_state import DeviceState
from dflash_backend.worker.request_table import RequestArrays
from dflash_backend.worker.transfers import Uploader

# Room for the changes of usual steps; a long prompt makes the buffers grow.
INITIAL_BYTES = 1 << 20


class DeviceRequests(RequestArrays):
    """The host's side of `DeviceState`: which request has which row, and what the plan for it needs to know.

    greedy: bool `[rows]`, requests that take the most likely token.
    """

    def __init__(self, state: DeviceState, vocab_size: int, greedy_drafts: bool, device: torch.device) -> None:
        """`greedy_drafts`: drafts are never drawn, so that their distributions need no room."""
        num_rows = len(state.tokens)
        super().__init__(num_rows, state.max_len, vocab_size, device)
        self.state = state
        self.tokens = state.tokens
        self.greedy = np.ones(num_rows, dtype=bool)
        self._draws_drafts = state.k > 0 and not greedy_drafts
        self._uploader = Uploader(INITIAL_BYTES, device, grows=True)

    def update(self, plan: StepPlan) -> None:
        """Take in what a plan changes: `finished`, then `new`, then the blocks that its rows gained.

        Waits for the device only for requests with a logit bias or `min_tokens`, whose ids it copies by themselves.
        """
        for request_id in plan.finished_req_ids:
            self.forget(request_id)
        indices = [self._learn(new) for new in plan.new_requests]
        columns: list[int] = []
        block_ids: list[int] = []
        gained: dict[int, int] = {}
        width = self.state.blocks.shape[1]
        for row in plan.rows:
            if row.new_block_ids:
                record = self.records[row.request_id]
                first = record.index * width + record.num_blocks
                columns += range(first, first + len(row.new_block_ids))
                block_ids += row.new_block_ids
                record.num_blocks += len(row.new_block_ids)
                gained[record.index] = record.num_blocks
        if plan.new_requests or gained:
            self._send(np.array(indices, dtype=np.int64), plan.new_requests, columns, block_ids, gained)

    def keep_draft_probs(self) -> None:
        """Make room for the distributions of drawn drafts, unless there is some or drafts are not drawn."""
        if self._draws_drafts and self.state.draft_probs is None:
            self.state.keep_draft_probs(self._vocab_size)

    def _learn(self, new: NewRequest) -> int:
        record = self.learn(new)
        self.greedy[record.index] = new.sampling.greedy
        if not new.sampling.greedy:
            self.keep_draft_probs()
        return record.index

    def _send(
        self,
        indices: np.ndarray,
        new: list[NewRequest],
        columns: list[int],
        block_ids: list[int],
        gained: dict[int, int],
    ) -> None:
        """Send the changes and queue what puts them in place.

        indices: int64 `[len(new)]`, the rows of the new requests. columns, block_ids: of each new block its place in
        the flat block table and its id. gained: the number of blocks of each row where it changed.
        """
        state = self.state
        arrays: list[np.ndarray] = [
            np.array(columns, dtype=np.int64),
            np.array(block_ids, dtype=np.int32),
            np.array(list(gained), dtype=np.int64),
            np.array(list(gained.values()), dtype=np.int32),
        ]
        parameters: list[tuple[torch.Tensor, np.ndarray]] = [
            (state.temperature, self.temperature),
            (state.top_p, self.top_p),
            (state.min_p, self.min_p),
            (state.top_k, self.top_k),
            (state.seeds, self.seeds),
        ]
        if new:
            arrays += [indices, *(host[indices] for _, host in parameters)]
            arrays += [np.array(request.token_ids, dtype=np.int64) for request in new]
        places, ids, rows, counts, *sent = self._uploader.send(arrays)
        state.blocks.view(-1).index_copy_(0, places, ids)
        state.num_blocks.index_copy_(0, rows, counts)
        if new:
            where, values, tokens = sent[0], sent[1 : 1 + len(parameters)], sent[1 + len(parameters) :]
            for (target, _), value in zip(parameters, values, strict=True):
                target.index_copy_(0, where, value)
            for index, token_ids in zip(indices.tolist(), tokens, strict=True):
                state.tokens[index, : len(token_ids)] = token_ids
