"""What the worker keeps of each request between steps: tensors on the device, and what the host must know of them.

A request's entry in every tensor and array has the same index, `req_idx`. What a plan changes is sent as one copy and
put in place by the device, behind the steps that it has yet to run. So a finished request's index can be given to
another at once: the steps in flight that still read it run first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.core.plan import NewRequest, SchedulerOutput
from dflash_backend.core.scheduler_config import max_positions
from dflash_backend.messages import SamplingParams
from dflash_backend.worker.transfers import Uploader, share

# Size of the buffers for the changes of usual steps; a long prompt makes them grow.
INITIAL_BYTES = 1 << 20
# Of a request, on the host (`RequestStates`) and on the device (`StateTensors`).
PARAMETERS = ("temperature", "top_p", "min_p", "top_k", "seeds", "penalties", "adapters")


@dataclass
class StateTensors:
    """The state of S requests, on the device.

    tokens: int64 `[S, max_len]`: prompt, output, and behind them the drafts of the step before, each at its position.
    blocks: int32 `[S, max_blocks]`, whose first `num_blocks` (int32 `[S]`) columns are the block table; the rest are
    old ids or 0, all of them ids of blocks that exist. computed: int32 `[S]`, positions whose KV is final.
    window_blocks: as `blocks`, for the target's layers with a window, where these have block ids of their own, else
    None. Columns of blocks that were given back hold ids of others, whose positions no query sees. confidence: float32
    `[S, k]`, how sure the drafter is of each of those drafts. temperature (0: greedy), top_p, min_p: float32 `[S]`.
    top_k (0: all tokens), seeds, adapters (the number of a LoRA adapter, 0 for none): int64 `[S]`. penalties: float32
    `[S, 3]`, repetition, frequency, presence.
    token_counts: int32 `[S, vocab]`, as of `dflash_kernels.penalties`, of the first `num_counted` (int32 `[S]`) tokens;
    up to date for requests with penalties only. block_size: tokens in a block. k: the most drafts of a request.

    Where prompt lookup drafts beside a drafter's model, else None, as of `dflash_kernels.draft_choice`: other_drafts,
    int64 `[S, k]`, the drafts that were not taken; num_other, int32 `[S]`, their number; lookup_gain, float32 `[S]`.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    computed: torch.Tensor
    confidence: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    penalties: torch.Tensor
    adapters: torch.Tensor
    token_counts: torch.Tensor
    num_counted: torch.Tensor
    block_size: int
    k: int
    window_blocks: torch.Tensor | None = None
    other_drafts: torch.Tensor | None = None
    num_other: torch.Tensor | None = None
    lookup_gain: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        num_requests: int,
        max_model_len: int,
        k: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        has_window_blocks: bool = False,
        has_lookup: bool = False,
    ) -> StateTensors:
        """For `num_requests` requests of at most `max_model_len` tokens, each with k drafts and one token behind."""
        max_len = max_positions(max_model_len, k)
        max_blocks = -(-max_len // block_size) + 1

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((num_requests, *shape), value, dtype=dtype, device=device)

        return cls(
            tokens=full(0, torch.int64, max_len),
            blocks=full(0, torch.int32, max_blocks),
            num_blocks=full(0, torch.int32),
            computed=full(0, torch.int32),
            confidence=full(0.0, torch.float32, k),
            temperature=full(0.0, torch.float32),
            top_p=full(1.0, torch.float32),
            min_p=full(0.0, torch.float32),
            top_k=full(0, torch.int64),
            seeds=full(0, torch.int64),
            penalties=full(0.0, torch.float32, 3),
            adapters=full(0, torch.int64),
            token_counts=full(0, torch.int32, vocab_size),
            num_counted=full(0, torch.int32),
            block_size=block_size,
            k=k,
            window_blocks=full(0, torch.int32, max_blocks) if has_window_blocks else None,
            other_drafts=full(0, torch.int64, k) if has_lookup else None,
            num_other=full(0, torch.int32) if has_lookup else None,
            lookup_gain=full(0.0, torch.float32) if has_lookup else None,
        )

    @property
    def max_len(self) -> int:
        """The most positions of a request."""
        return self.tokens.shape[1]


@dataclass
class RequestRecord:
    """What the host knows of one request beside its entry in the arrays of `RequestStates`, at `index`.

    stop_ids: int64, the tokens that end it and that `min_tokens` hides; empty without that. bias_ids int64 and bias
    float32, of one length: its logit bias. allowed_ids: int64, the only tokens that may come, all where it is empty.
    All are on the device.
    """

    index: int
    sampling: SamplingParams
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias: torch.Tensor
    allowed_ids: torch.Tensor
    bad_words: BadWords | None = None
    num_blocks: int = 0
    processed: bool = False
    """Whether its logits may have to be changed, or looked at for log-probabilities."""

    @property
    def needs_layout(self) -> bool:
        """Whether the host must know where the logits of its rows lie, and so how many drafts are verified."""
        return self.processed or self.sampling.structured_outputs is not None


class RequestStates:
    """The requests that the worker holds: `state` on the device, and the host's mirror of what plans decide.

    On the host, one entry for each request: temperature (0: greedy), top_p, min_p float32, top_k (0: all
    tokens), seeds, adapters int64. And what logits processors need: num_prompt_tokens int64; min_end int64, the
    position below which stop tokens are hidden, 0 for none; biased, masked and penalised bool; penalties float32
    `[S, 3]`, repetition, frequency, presence; num_logprobs and num_prompt_logprobs int64, -1 for none.
    """

    def __init__(self, state: StateTensors, vocab_size: int, adapter_names: Sequence[str] = ()) -> None:
        """adapter_names: the target's LoRA adapters."""
        count = len(state.tokens)
        self.state = state
        self.device = state.tokens.device
        self.records: dict[str, RequestRecord] = {}
        self._free = list(range(count - 1, -1, -1))
        self._vocab_size = vocab_size
        self._send = Uploader(INITIAL_BYTES, self.device, grows=True).send if self.device.type == "cuda" else share
        self.temperature = np.zeros(count, dtype=np.float32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int64)
        self.seeds = np.zeros(count, dtype=np.int64)
        self.adapters = np.zeros(count, dtype=np.int64)
        self._adapter_numbers = {name: number for number, name in enumerate(adapter_names, 1)} | {"": 0}
        self.num_prompt_tokens = np.zeros(count, dtype=np.int64)
        self.min_end = np.zeros(count, dtype=np.int64)
        self.biased = np.zeros(count, dtype=bool)
        self.masked = np.zeros(count, dtype=bool)
        self.penalised = np.zeros(count, dtype=bool)
        self.penalties = np.zeros((count, 3), dtype=np.float32)
        self.num_logprobs = np.full(count, -1, dtype=np.int64)
        self.num_prompt_logprobs = np.full(count, -1, dtype=np.int64)
        self.num_processed = 0  # requests of `RequestRecord.processed`
        self.num_sampled = 0  # requests with a temperature
        self.num_adapted = 0  # requests with a LoRA adapter
        # A GPU's captured steps hold for any adapters, and memory is measured for what steps take with some.
        self.adapts_all = bool(adapter_names) and self.device.type == "cuda"

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's changes: `finished_req_ids`, then `new_requests`, then the blocks that its rows gained.

        Waits for the device only for requests that name tokens, as in a logit bias, whose ids it copies by themselves.
        """
        for request_id in plan.finished_req_ids:
            self.remove(request_id)
        new, state = plan.new_requests, self.state
        added = [self.add(each).index for each in new]
        # Of each new block its place in the flat block table and its id, also that for the other table, if there is
        # one; and by request index, the number of blocks where it changed.
        columns: list[int] = []
        block_ids: list[int] = []
        window_ids: list[int] = []
        gained: dict[int, int] = {}
        width = state.blocks.shape[1]
        for row in plan.rows:
            if row.new_block_ids:
                record = self.records[row.request_id]
                first = record.index * width + record.num_blocks
                columns += range(first, first + len(row.new_block_ids))
                block_ids += row.new_block_ids
                window_ids += row.new_window_block_ids
                record.num_blocks += len(row.new_block_ids)
                gained[record.index] = record.num_blocks
        if not (new or gained):
            return
        arrays: list[np.ndarray] = [
            np.array(columns, dtype=np.int64),
            np.array(block_ids, dtype=np.int32),
            np.array(list(gained), dtype=np.int64),
            np.array(list(gained.values()), dtype=np.int32),
            np.array(window_ids, dtype=np.int32),
        ]
        if new:
            indices = np.array(added, dtype=np.int64)
            arrays += [indices, indices[self.penalised[indices]]]
            arrays += [getattr(self, name)[indices] for name in PARAMETERS]
            arrays += [np.array(request.token_ids, dtype=np.int64) for request in new]
        positions, ids, rows, counts, of_windows, *sent = self._send(arrays)
        state.blocks.view(-1).index_copy_(0, positions, ids)
        if state.window_blocks is not None and window_ids:
            state.window_blocks.view(-1).index_copy_(0, positions, of_windows)
        state.num_blocks.index_copy_(0, rows, counts)
        if new:
            where, penalised, *sent = sent
            values, tokens = sent[: len(PARAMETERS)], sent[len(PARAMETERS) :]
            for name, value in zip(PARAMETERS, values, strict=True):
                target = getattr(state, name)
                target.index_copy_(0, where, value.view(-1, *target.shape[1:]))
            if len(penalised) > 0:
                state.token_counts.index_fill_(0, penalised, 0)
                state.num_counted.index_fill_(0, penalised, 0)
            for index, token_ids in zip(added, tokens, strict=True):
                state.tokens[index, : len(token_ids)] = token_ids

    def remove(self, request_id: str) -> None:
        """Drop a request. One that the worker does not hold is an error of the core."""
        record = self.records.pop(request_id)
        self._free.append(record.index)
        self.num_processed -= record.processed
        self.num_sampled -= bool(self.temperature[record.index])
        self.num_adapted -= bool(self.adapters[record.index])

    def clear(self) -> None:
        """Drop every request, and what rows have learned of them."""
        self.records.clear()
        if self.state.lookup_gain is not None:
            self.state.lookup_gain.zero_()
        self.num_processed = self.num_sampled = self.num_adapted = 0
        self._free = list(range(len(self.temperature) - 1, -1, -1))

    def add(self, new: NewRequest) -> RequestRecord:
        """Take a request in, on the host."""
        index = self._free.pop()
        sampling = new.sampling
        record = self._record(index, new)
        self.records[new.request_id] = record
        self.temperature[index] = 0.0 if sampling.greedy else sampling.temperature
        self.num_sampled += bool(self.temperature[index])
        self.top_p[index] = sampling.top_p
        self.min_p[index] = sampling.min_p
        self.top_k[index] = max(sampling.top_k, 0)
        self.seeds[index] = new.seed
        self.adapters[index] = self._adapter_numbers[sampling.lora_name]
        self.num_adapted += bool(self.adapters[index])
        self.num_prompt_tokens[index] = new.num_prompt_tokens
        min_end = min(new.num_prompt_tokens + sampling.min_tokens, self.state.max_len)
        self.min_end[index] = min_end if len(record.stop_ids) else 0
        self.biased[index] = len(record.bias_ids) > 0
        self.masked[index] = sampling.masks_tokens
        self.penalised[index] = sampling.penalised
        self.penalties[index] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        # Tokens that the request names take the place of the most likely ones.
        num_top = 0 if sampling.logprob_token_ids else sampling.logprobs
        self.num_logprobs[index] = -1 if num_top is None or sampling.logprobs is None else num_top
        self.num_prompt_logprobs[index] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        changes = self.min_end[index] > 0 or self.biased[index] or self.masked[index] or self.penalised[index]
        record.processed = bool(changes) or sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.num_processed += record.processed
        return record

    def _record(self, index: int, new: NewRequest) -> RequestRecord:
        sampling, vocab_size = new.sampling, self._vocab_size
        # Hidden only before `min_tokens`; without it there is nothing to look them up for. A grammar's masks hide them.
        stops: set[int] = set()
        if sampling.min_tokens > 0 and sampling.structured_outputs is None:
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
            torch.tensor(sampling.allowed_token_ids or (), dtype=torch.int64, device=self.device),
            BadWords.of(sampling.bad_words_token_ids, self.device),
        )


@dataclass(frozen=True)
class BadWords:
    """The bad words of a request, W of them, the longest of L tokens, int64 on the device.

    prefixes: `[W, L - 1]`, the tokens before each word's last one, at the end of its row, behind -1 where it has fewer.
    last: `[W]`, the last tokens, which are hidden behind the others. prefix_lens: `[W]`.
    """

    prefixes: torch.Tensor
    last: torch.Tensor
    prefix_lens: torch.Tensor

    @classmethod
    def of(cls, words: Sequence[Sequence[int]], device: torch.device) -> BadWords | None:
        """From token ids, at least one for each word; None without any word."""
        if not words:
            return None
        longest = max(map(len, words))
        prefixes = [[-1] * (longest - len(ids)) + list(ids[:-1]) for ids in words]
        return cls(
            torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(words), longest - 1),
            torch.tensor([ids[-1] for ids in words], dtype=torch.int64, device=device),
            torch.tensor([len(ids) - 1 for ids in words], dtype=torch.int64, device=device),
        )

    def hide(self, logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor, num_prompt_tokens: int) -> None:
        """Hide, in place, the last token of each word whose other tokens end the output.

        logits: float32 `[n, vocab]`, for `position` (int64 `[]`) and those behind it. tokens: int64 `[max_len]`, the
        request's, with its drafts. So a row of logits counts the drafts before it. A prefix is looked for in the output
        only, as in vLLM.
        """
        width = self.prefixes.shape[1]
        ends = (position + torch.arange(len(logits), device=logits.device))[:, None]
        columns = ends - width + torch.arange(width, device=logits.device)
        before = tokens[columns.clamp(0, len(tokens) - 1)]
        matches = ((before[:, None] == self.prefixes) | (self.prefixes < 0)).all(dim=2)
        hidden = matches & (ends - self.prefix_lens >= num_prompt_tokens)
        bias = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(hidden, float("-inf"))
        # Adds up where two words end with the same token.
        logits.index_add_(1, self.last, bias)
