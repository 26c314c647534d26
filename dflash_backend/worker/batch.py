"""A step's rows as flat arrays: which tokens run at which positions, and where their K/V goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.worker.request_table import RequestTable


@dataclass(frozen=True)
class StepBatch:
    """Rows in the order they run, all arrays int64 on the host.

    Per row `[num_rows]`: table (row in the request table), start (`num_computed`), num_new, num_draft, num_next_draft,
    first_token (index of the row's first token). Per token `[num_tokens]`: row, position, slot.
    """

    rows: list[ScheduledRequest]
    request_ids: list[str]
    table: np.ndarray
    start: np.ndarray
    num_new: np.ndarray
    num_draft: np.ndarray
    num_next_draft: np.ndarray
    sample: np.ndarray
    first_token: np.ndarray
    token_row: np.ndarray
    token_position: np.ndarray
    token_slot: np.ndarray
    block_size: int
    blocks: np.ndarray

    @classmethod
    def build(cls, rows: list[ScheduledRequest], requests: RequestTable, block_size: int) -> StepBatch:
        """The rows in the order given: alike ones should be neighbours, so that attention can pad them to one batch."""
        fields = [(row.num_computed, row.num_new, row.num_draft, row.num_next_draft, row.sample) for row in rows]
        start, num_new, num_draft, num_next, sample = np.array(fields, dtype=np.int64).T
        table = np.array([requests.records[row.request_id].index for row in rows], dtype=np.int64)
        lens = num_new + num_draft
        first = np.cumsum(lens) - lens
        token_row, position = spans(start, lens)
        slots = slots_of(requests.blocks, table[token_row], position, block_size)
        request_ids = [row.request_id for row in rows]
        return cls(
            rows, request_ids, table, start, num_new, num_draft, num_next, sample.astype(bool),
            first, token_row, position, slots, block_size, requests.blocks,
        )  # fmt: skip

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """K/V slots of `positions` of the batch's `rows`, both int64 `[n]`."""
        return slots_of(self.blocks, self.table[rows], positions, self.block_size)

    def block_tables(self, rows: np.ndarray, num_positions: int) -> np.ndarray:
        """Block tables of the batch's `rows`, as wide as `num_positions` need: int64 `[n, blocks]`."""
        return self.blocks[self.table[rows], : -(-num_positions // self.block_size)]


def spans(starts: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows that cover `[start, start + len)`: the row and the value of each covered number, both int64 `[n]`."""
    rows = np.repeat(np.arange(len(lens)), lens)
    first = np.cumsum(lens) - lens
    return rows, starts[rows] + np.arange(len(rows)) - first[rows]


def slots_of(blocks: np.ndarray, table_rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """K/V slots of `positions` of the requests in `table_rows`, both int64 `[n]`."""
    slots: np.ndarray = blocks[table_rows, positions // block_size] * block_size + positions % block_size
    return slots
