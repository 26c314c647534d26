"""A launch of each kernel that a step's operations consist of, for `compile_only`."""

from __future__ import annotations

import torch

from dflash_backend.sampling.random import Stream
from dflash_backend.worker.batch import DeviceBatch
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step_ops import DeviceStepOps

VOCAB, ROWS, K = 5008, 4, 7


def launches() -> None:
    """A step with sampled rows, one without, and drafts that were drawn or not."""
    ops = DeviceStepOps()
    state = StateTensors.allocate(ROWS, 100, K, 16, torch.device("cpu"))
    rows = DeviceBatch.over(torch.zeros(DeviceBatch.buffer_size(ROWS, ROWS * (K + 1)), dtype=torch.int32), ROWS)
    logits = torch.zeros(ROWS * (K + 1), VOCAB, dtype=torch.bfloat16)
    parameters = state.sampling_tensors(rows.req_idx, False, False)
    prepared = ops.prepare(rows, state)
    best, probs = ops.argmax(logits), ops.probabilities(logits, parameters)
    ops.draw(probs[:ROWS], state.seeds, state.seeds, Stream.TARGET)
    for target in (None, probs):
        ops.accept(best, target, rows, prepared, state)
    state.allocate_draft_probs(VOCAB)
    ops.accept(best, probs, rows, prepared, state)
    ops.inject_slots(rows, prepared, state)
    queries = ops.prepare_draft(rows, state, 3)
    ops.store_drafts(queries.token_ids[:, 1:], rows, state, torch.zeros(ROWS, K, VOCAB))
