"""What the worker remembers of each request between steps: tokens, blocks, sampling parameters, drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.core.plan import NewRequest, ScheduledRequest
from dflash_backend.core.scheduler_config import max_positions
from dflash_backend.messages import SamplingParams
from dflash_backend.sampling.filtering import SamplingRows


@dataclass
class RequestRecord:
    """What there is of one request beside its row in the table's arrays, whose number is `index`.

    stop_ids: int64, the tokens that end it and that `min_tokens` hides; empty without that. bias_ids int64 and bias
    float32, of one length: its logit bias. All three are on the device.
    """

    index: int
    sampling: SamplingParams
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor
    num_blocks: int = 0


class RequestArrays:
    """What the host knows of the requests that the worker holds, a row for each; the base of both workers' tables.

    tokens: int64 `[rows, max_len]`, on the device, which the worker's table sets: prompt, output, and behind them the
    drafts of the step before, each at its position.

    On the host, one entry for each row: temperature (above 0), top_p, min_p float32, top_k (0: all tokens), seeds
    int64. And what `worker.logits` looks at in every step: num_prompt_tokens int64; min_end int64, the position below
    which stop tokens are hidden; biased and penalised bool; penalties float32 `[rows, 3]`, repetition, frequency,
    presence; num_logprobs int64, -1 for none.
    """

    tokens: torch.Tensor

    def __init__(self, num_rows: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.records: dict[str, RequestRecord] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._max_len = max_len
        self._vocab_size = vocab_size
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.seeds = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_end = np.zeros(num_rows, dtype=np.int64)
        self.biased = np.zeros(num_rows, dtype=bool)
        self.penalised = np.zeros(num_rows, dtype=bool)
        self.penalties = np.zeros((num_rows, 3), dtype=np.float32)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)

    def forget(self, request_id: str) -> None:
        """Drop a request. One that the worker does not hold is an error of the core."""
        self._free.append(self.records.pop(request_id).index)

    def clear(self) -> None:
        """Drop every request."""
        self.records.clear()
        self._free = list(range(len(self.temperature) - 1, -1, -1))

    def learn(self, new: NewRequest) -> RequestRecord:
        """Take a request in; its tokens are left to the worker's table."""
        index = self._free.pop()
        sampling = new.sampling
        record = self._record(index, new)
        self.records[new.request_id] = record
        self.temperature[index] = sampling.temperature or 1.0
        self.top_p[index] = sampling.top_p
        self.min_p[index] = sampling.min_p
        self.top_k[index] = max(sampling.top_k, 0)
        self.seeds[index] = new.seed
        self.num_prompt_tokens[index] = new.num_prompt_tokens
        min_end = min(new.num_prompt_tokens + sampling.min_tokens, self._max_len)
        self.min_end[index] = min_end if len(record.stop_ids) else 0
        self.biased[index] = len(record.bias_ids) > 0
        self.penalised[index] = sampling.penalised
        self.penalties[index] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        self.num_logprobs[index] = -1 if sampling.logprobs is None else sampling.logprobs
        return record

    def _record(self, index: int, new: NewRequest) -> RequestRecord:
        sampling, vocab_size = new.sampling, self._vocab_size
        # Hidden only before `min_tokens`; without it there is nothing to look them up for.
        stops: set[int] = set()
        if sampling.min_tokens > 0:
            stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(new.eos_token_ids))
        # An id that is no token never comes, and must not be looked up in the logits either.
        stop_ids = sorted(i for i in stops if 0 <= i < vocab_size)
        bias = {i: value for i, value in sampling.logit_bias.items() if 0 <= i < vocab_size}
        return RequestRecord(
            index,
            sampling,
            torch.tensor(stop_ids, dtype=torch.int64, device=self.device),
            torch.tensor(list(bias), dtype=torch.int64, device=self.device),
            torch.tensor(list(bias.values()), dtype=torch.float32, device=self.device),
        )


class RequestTable(RequestArrays):
    """What a worker that runs its steps at once remembers of each request.

    blocks: int64 `[max_num_seqs, max_blocks]`, on the host.
    draft_probs: float32 `[max_num_seqs, k, vocab]`, what sampled drafts were drawn from; empty until a sampled request
    comes, since greedy service never needs it.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, k: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        max_len = max_positions(max_model_len, k)
        super().__init__(max_num_seqs, max_len, vocab_size, device)
        self.tokens = torch.zeros(max_num_seqs, max_len, dtype=torch.int64, device=device)
        self.blocks = np.zeros((max_num_seqs, -(-max_len // block_size) + 1), dtype=np.int64)
        self._probs_shape = (max_num_seqs, k, vocab_size)
        self.draft_probs = torch.zeros(0, k, vocab_size, dtype=torch.float32, device=device)

    def learn(self, new: NewRequest) -> RequestRecord:
        """Take a request in, with its tokens."""
        record = super().learn(new)
        self.tokens[record.index, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int64)
        if not new.sampling.greedy and len(self.draft_probs) == 0:
            self.draft_probs = torch.zeros(self._probs_shape, dtype=torch.float32, device=self.device)
        return record

    def append_blocks(self, row: ScheduledRequest) -> None:
        """Append the blocks that a row gained."""
        if row.new_block_ids:
            record = self.records[row.request_id]
            end = record.num_blocks + len(row.new_block_ids)
            self.blocks[record.index, record.num_blocks : end] = row.new_block_ids
            record.num_blocks = end

    def sampling_rows(self, indices: np.ndarray) -> SamplingRows:
        """Sampling parameters of the table rows `indices` (int64 `[n]`), on the device."""
        top_p, top_k, min_p = self.top_p[indices], self.top_k[indices], self.min_p[indices]

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return SamplingRows(
            temperature=put(self.temperature[indices]),
            top_p=put(top_p),
            top_k=put(top_k),
            min_p=put(min_p),
            seeds=put(self.seeds[indices]),
            any_top_k_or_p=bool((top_p < 1.0).any() or (top_k > 0).any()),
            any_min_p=bool((min_p > 0.0).any()),
        )
