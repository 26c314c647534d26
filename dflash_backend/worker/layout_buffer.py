"""The buffer on a GPU that the layouts of steps are sent to."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.attention import SharedPrefixes
from dflash_backend.worker.batch import (
    ROW_MULTIPLE,
    BatchTraits,
    DeviceBatch,
    HostBatch,
    StepInputs,
    round_bytes,
    rounded,
)
from dflash_backend.worker.shared_rows import num_shared_numbers, shared_numbers, shared_rows
from dflash_backend.worker.transfers import ALIGNMENT, Uploader


class LayoutBuffer:
    """Where the layouts of steps lie on a GPU, always at the same address: a captured graph reads it there."""

    def __init__(self, max_rows: int, max_tokens: int, k: int, device: torch.device, block_size: int = 1) -> None:
        """For steps of at most that many rows and tokens, and blocks of at most k drafts. block_size: positions of a
        KV block."""
        self.k, self.block_size = k, block_size
        # Rows of any step, padding included.
        self.max_rows = rounded(max_rows, ROW_MULTIPLE)
        numbers = DeviceBatch.buffer_size(self.max_rows, max_tokens)
        # Besides, two numbers for each row of logits, of which there are no more than tokens, and the budget's.
        numbers += 2 * max_tokens + 2 + k + self.max_rows
        # And the prefixes that rows share.
        numbers += num_shared_numbers(self.max_rows)
        self._uploader = Uploader(4 * numbers + 5 * ALIGNMENT, device)

    def padded(self, num_rows: int, num_tokens: int) -> tuple[DeviceBatch, torch.Tensor]:
        """The layout and the budget of padded steps with that many rows and tokens: what the last `send_padded` of this
        shape sent, whenever the device reads it."""
        size = 4 * DeviceBatch.buffer_size(num_rows, num_tokens)
        first = round_bytes(size)
        buffer = self._uploader.buffer
        budget = buffer[first : first + 4 * (2 + self.k + num_rows)].view(torch.float32)
        return DeviceBatch.over(buffer[:size].view(torch.int32), num_rows), budget

    def padded_shared(self, num_rows: int, num_tokens: int, max_len: int) -> SharedPrefixes:
        """The prefixes that rows of padded steps share, as `padded` has the layout. max_len: positions of a row."""
        first = round_bytes(4 * DeviceBatch.buffer_size(num_rows, num_tokens))
        first += round_bytes(4 * (2 + self.k + num_rows))
        numbers = self._uploader.buffer[first : first + 4 * num_shared_numbers(num_rows)].view(torch.int32)
        return SharedPrefixes(shared_rows(numbers), num_tokens, max_len)

    def send_padded(self, batch: HostBatch, num_rows: int, num_tokens: int) -> None:
        """Send the layout of rows in a padded step. Where their tokens and logits lie is decided on the device. With a
        budget as many drafts are verified as there are tokens, since these run in any case."""
        nowhere = np.zeros(len(batch.req_idx), dtype=np.int64)
        numbers = batch.numbers(num_rows, nowhere, np.where(batch.sample, 0, -1), np.full(num_tokens, -1))
        budget = batch.budget_numbers(self.k, num_rows, num_tokens - int(batch.num_new.sum()))
        self._uploader.send([numbers, budget, shared_numbers(batch.shared, num_rows, self.block_size)])

    def send_nothing(self, num_rows: int, num_tokens: int) -> None:
        """Send the layout of padding rows alone, to run a padded step that changes nothing."""
        none = np.zeros(0, dtype=np.int64)
        flags = none.astype(bool)
        batch = HostBatch([], *(none,) * 6, sample=flags, traits=BatchTraits(False, False))
        self.send_padded(batch, num_rows, num_tokens)

    def send_ragged(self, batch: HostBatch) -> StepInputs:
        """Send the layout of any rows. What is returned is valid on the device until the next layout is sent."""
        return batch.ragged(self._uploader.send, ROW_MULTIPLE, self.k, self.block_size)
