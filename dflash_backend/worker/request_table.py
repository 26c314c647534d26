"""What the worker remembers of each request between steps: tokens, blocks, sampling parameters, drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.core.plan import NewRequest, ScheduledRow
from dflash_backend.messages import SamplingParams
from dflash_backend.speculative.sampling import SamplingRows


@dataclass
class RequestRecord:
    """The host's side of one request; `index` is its row in the table's arrays."""

    index: int
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_ids: torch.Tensor
    num_blocks: int = 0


class RequestTable:
    """Arrays with a row for each request that the worker holds.

    tokens: int64 `[max_num_seqs, max_len]`, on the device: prompt, output, and behind them the drafts of the step
    before, each at its position. blocks: int64 `[max_num_seqs, max_blocks]`, on the host.
    draft_probs: float32 `[max_num_seqs, k, vocab]`, what sampled drafts were drawn from; empty until a sampled request
    comes, since greedy service never needs it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, k: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        max_len = max_model_len + k + 1
        self.device = device
        self.tokens = torch.zeros(max_num_seqs, max_len, dtype=torch.int64, device=device)
        self.blocks = np.zeros((max_num_seqs, -(-max_len // block_size) + 1), dtype=np.int64)
        self.records: dict[str, RequestRecord] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._probs_shape = (max_num_seqs, k, vocab_size)
        self.draft_probs = torch.zeros(0, k, vocab_size, dtype=torch.float32, device=device)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)

    def forget(self, request_id: str) -> None:
        """Drop a request. One that the worker does not hold is an error of the core."""
        self._free.append(self.records.pop(request_id).index)

    def learn(self, new: NewRequest) -> None:
        """Take a request in."""
        index = self._free.pop()
        sampling = new.sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(new.eos_token_ids))
        vocab_size = self._probs_shape[2]
        # A stop id that is no token never comes, and must not be looked up in the logits either.
        known = sorted(i for i in stops if 0 <= i < vocab_size)
        stop_ids = torch.tensor(known, dtype=torch.int64, device=self.device)
        self.records[new.request_id] = RequestRecord(index, new.num_prompt_tokens, sampling, stop_ids)
        self.tokens[index, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int64)
        self._temperature[index] = sampling.temperature or 1.0
        self._top_p[index] = sampling.top_p
        self._min_p[index] = sampling.min_p
        self._top_k[index] = max(sampling.top_k, 0)
        self._seeds[index] = new.seed
        if not sampling.greedy and len(self.draft_probs) == 0:
            self.draft_probs = torch.zeros(self._probs_shape, dtype=torch.float32, device=self.device)

    def append_blocks(self, row: ScheduledRow) -> None:
        """Append the blocks that a row gained."""
        if row.new_block_ids:
            record = self.records[row.request_id]
            end = record.num_blocks + len(row.new_block_ids)
            self.blocks[record.index, record.num_blocks : end] = row.new_block_ids
            record.num_blocks = end

    def sampling_rows(self, indices: np.ndarray) -> SamplingRows:
        """Sampling parameters of the table rows `indices` (int64 `[n]`), on the device."""
        top_p, top_k, min_p = self._top_p[indices], self._top_k[indices], self._min_p[indices]

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return SamplingRows(
            temperature=put(self._temperature[indices]),
            top_p=put(top_p),
            top_k=put(top_k),
            min_p=put(min_p),
            seeds=put(self._seeds[indices]),
            any_top_k_or_p=bool((top_p < 1.0).any() or (top_k > 0).any()),
            any_min_p=bool((min_p > 0.0).any()),
        )
