"""Random steps on device state, for the tests of a step's operations."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.worker.batch import BatchTraits, DeviceBatch, ForwardBatch, LengthBounds
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import StepOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 77
MASK_ID = 76


@dataclass
class RandomStep:
    """State and rows of a step, with the number of its rows of logits."""

    state: StateTensors
    rows: DeviceBatch
    num_logits: int

    @property
    def inputs(self) -> ForwardBatch:
        """With bounds that hold for the rows that go on."""
        rows = self.rows
        lens, starts = rows.query_lens.cpu().numpy(), rows.start_bound.cpu().numpy()
        ends = (starts + lens).astype(np.int64)
        bounds = LengthBounds(lens.astype(np.int64), ends, ends + 2 * self.state.k + 2, self.state.max_len)
        # Padding rows of logits, and the `num_draft + 1` of each row that samples.
        token, row = np.zeros((2, max(self.num_logits, 1)), dtype=np.int32)
        row -= 1
        for r, start in enumerate(rows.logits_start.tolist()):
            if start >= 0:
                end = start + int(rows.num_draft[r]) + 1
                row[start:end] = r
                token[start:end] = int(rows.query_start[r] + rows.num_new[r]) - 1 + np.arange(end - start)
        device = rows.req_idx.device
        logits_token, logits_row = (torch.from_numpy(each).to(device) for each in (token, row))
        return ForwardBatch(rows, logits_token, logits_row, bounds, BatchTraits(True, True), self.state.k)

    def to(self, device: torch.device) -> RandomStep:
        """A copy on another device."""
        rows = DeviceBatch(**{name: getattr(self.rows, name).to(device) for name in DeviceBatch.__dataclass_fields__})
        return RandomStep(_moved(copy.deepcopy(self.state), device), rows, self.num_logits)

    def copy_of_state(self) -> StateTensors:
        """A state of its own for one of the operations that change it."""
        return copy.deepcopy(self.state)


def random_step(
    seed: int,
    k: int,
    num_rows: int = 7,
    block_size: int = 4,
    padding: bool = True,
    zombies: bool = True,
    graph: bool = False,
) -> RandomStep:
    """Rows of every kind: decoding, first chunks, chunks in the middle, resumed, sampled and greedy; some of padding,
    some uncertain, and some whose requests have run past their blocks or past the width of the tokens.

    graph: 1 + k tokens and rows of logits for each row, those that are not used being padding.
    """
    generator = torch.Generator().manual_seed(seed)
    max_model_len = 6 * block_size + 1
    state = _random_state(generator, num_rows + 2, max_model_len, k, block_size)
    indices = torch.randperm(num_rows + 2, generator=generator).tolist()
    layout: list[dict[str, int]] = []
    token_row: list[int] = []
    num_logits = 0
    for r in range(num_rows):
        row = {"req_idx": -1, "logits_start": -1}
        if not padding or _below(generator, 4):
            row = _random_row(generator, state, indices[r], max_model_len - k - 6, graph, zombies)
        if row["logits_start"] >= 0:
            row["logits_start"] = r * (k + 1) if graph else num_logits
            num_logits += row["num_draft"] + 1
        layout.append(row | {"query_start": len(token_row)})
        token_row += [r] * row.get("query_lens", 0)
        if graph:
            token_row += [-1] * ((r + 1) * (k + 1) - len(token_row))
        elif padding:
            token_row += [-1] * _below(generator, 2)
    buffer = torch.zeros(DeviceBatch.buffer_size(num_rows, len(token_row)), dtype=torch.int32)
    rows = DeviceBatch.over(buffer, num_rows)
    for r, row in enumerate(layout):
        for name, value in row.items():
            getattr(rows, name)[r] = value
    rows.token_row.copy_(torch.tensor(token_row, dtype=torch.int32))
    num_logits = num_rows * (k + 1) if graph else num_logits
    return RandomStep(_moved(state, DEVICE), DeviceBatch.over(buffer.to(DEVICE), num_rows), num_logits)


def prepared_step(ops: StepOps, step: RandomStep, state: StateTensors) -> ForwardBatch:
    """The step once it is prepared."""
    inputs = step.inputs
    ops.prepare(inputs, state)
    return inputs


def accepted_step(ops: StepOps, step: RandomStep, state: StateTensors, target_tokens: torch.Tensor) -> ForwardBatch:
    """The step once its drafts are accepted where they are these tokens, int64 `[D]`."""
    inputs = prepared_step(ops, step, state)
    inputs.target_tokens = target_tokens
    ops.accept(inputs, state)
    return inputs


def _below(generator: torch.Generator, bound: int) -> int:
    return int(torch.randint(bound, (), generator=generator))


def _random_state(
    generator: torch.Generator, num_requests: int, max_model_len: int, k: int, block_size: int
) -> StateTensors:
    """Requests with random tokens and parameters, and scattered blocks."""
    state = StateTensors.allocate(num_requests, max_model_len, k, block_size, VOCAB, torch.device("cpu"))
    state.tokens.random_(VOCAB, generator=generator)
    state.blocks.copy_(torch.randperm(state.blocks.numel(), generator=generator).view_as(state.blocks))
    state.seeds.random_(generator=generator)
    state.temperature.uniform_(0.2, 2.0, generator=generator)
    for values, value in ((state.temperature, 0.0), (state.top_k, 4), (state.top_p, 0.7), (state.min_p, 0.1)):
        values[torch.rand(num_requests, generator=generator) < 0.3] = value
    return state


def _random_row(
    generator: torch.Generator, state: StateTensors, req_idx: int, max_start: int, decodes: bool, zombies: bool
) -> dict[str, int]:
    """The numbers of a row of request `req_idx`, whose state is set to go with them. `logits_start` is 0 where the row
    samples. decodes: whether it must; else it may be a chunk of a prompt."""

    def below(bound: int) -> int:
        return _below(generator, bound)

    decodes = decodes or below(2) == 0
    row = {"req_idx": req_idx, "start_bound": below(max_start), "num_new": 1 if decodes else 1 + below(5)}
    row["num_draft"] = below(state.k + 1) if decodes else 0
    row["num_next_draft"] = below(state.k + 1)
    row["query_lens"] = row["num_new"] + row["num_draft"]
    row["logits_start"] = 0 if decodes or below(2) == 0 else -1
    computed = row["start_bound"]
    if decodes and row["start_bound"] > 0 and below(2) == 0:
        row["num_unverified_drafts"] = 1 + below(row["start_bound"])
        computed -= below(row["num_unverified_drafts"] + 1)
    end = row["start_bound"] + row["query_lens"] + row["num_next_draft"] + 1
    state.num_blocks[req_idx] = min(-(-end // state.block_size) + below(2), state.blocks.shape[1])
    if zombies and "num_unverified_drafts" in row and below(2) == 0:
        computed = below(state.max_len + 2 * state.block_size)
    state.computed[req_idx] = computed
    return row


def _moved(state: StateTensors, device: torch.device) -> StateTensors:
    fields = {name: getattr(state, name) for name in StateTensors.__dataclass_fields__}
    return StateTensors(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in fields.items()})


def random_target(step: RandomStep, seed: int) -> torch.Tensor:
    """The target's tokens, int64 `[D]`, of which about three in four are the draft."""
    generator = torch.Generator().manual_seed(seed + 1000)
    state, rows = step.copy_of_state(), step.rows
    tokens = torch.randint(VOCAB, (step.num_logits,), generator=generator)
    starts = torch.where(rows.num_unverified_drafts > 0, state.computed[rows.req_idx.clamp(min=0)], rows.start_bound)
    for r in range(len(rows.req_idx)):
        for j in range(int(rows.num_draft[r]) if rows.logits_start[r] >= 0 else 0):
            position = int(starts[r] + rows.num_new[r]) + j
            if position < state.max_len and torch.rand((), generator=generator) < 0.75:
                tokens[int(rows.logits_start[r]) + j] = state.tokens[rows.req_idx[r], position]
    return tokens.to(DEVICE)
