"""The accept phase for rows of one kind (greedy or sampled): logits, verification, new tokens. Called by the runner."""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.models.interface import TargetModel
from dflash_backend.speculative.sampling import probabilities
from dflash_backend.speculative.verify import VerifyLayout, verify_greedy, verify_sampled
from dflash_backend.worker.batch import StepBatch, spans
from dflash_backend.worker.request_table import RequestTable


def accept_rows(
    batch: StepBatch,
    rows: np.ndarray,
    hidden: torch.Tensor,
    target: TargetModel,
    requests: RequestTable,
    greedy: bool,
    greedy_drafts: bool,
) -> tuple[np.ndarray, list[list[int]]]:
    """Verify the drafts of the batch's `rows` (int64 `[n]`) and write the token after them into the request table.

    hidden: `[num_tokens, hidden_size]`, the target's output for the whole step. Returns the number of drafts that
    stand, int64 `[n]` on the host, and each row's new tokens: those drafts and the token that follows.
    """
    device = hidden.device
    num_draft = batch.num_draft[rows]
    last_known = batch.first_token[rows] + batch.num_new[rows] - 1
    _, flat = spans(last_known, num_draft + 1)
    logits = target.logits(hidden[torch.from_numpy(flat).to(device)])
    first_position = batch.start[rows] + batch.num_new[rows]
    _forbid_stops(logits, batch, rows, first_position, requests)

    layout = VerifyLayout.build(num_draft, device)
    table = torch.from_numpy(batch.table[rows]).to(device)
    positions = torch.from_numpy(first_position).to(device)
    drafts = requests.tokens[table[layout.draft_rows], positions[layout.draft_rows] + layout.draft_columns]
    if greedy:
        accepted, following = verify_greedy(logits.argmax(dim=-1), drafts, layout)
    else:
        row_parameters = requests.sampling_rows(batch.table[rows])
        distribution_rows, _ = spans(last_known, num_draft + 1)
        parameters = row_parameters.select(torch.from_numpy(distribution_rows).to(device))
        draft_probs = None
        if not greedy_drafts and layout.max_draft > 0:
            draft_probs = requests.draft_probs[table[layout.draft_rows], layout.draft_columns]
        probs = probabilities(logits, parameters)
        accepted, following = verify_sampled(probs, draft_probs, drafts, positions, row_parameters, layout)
    requests.tokens[table, positions + accepted] = following

    columns = torch.arange(layout.max_draft + 1, device=device)
    new_tokens = requests.tokens[table[:, None], positions[:, None] + columns].tolist()
    counts = accepted.cpu().numpy()
    return counts, [tokens[: count + 1] for tokens, count in zip(new_tokens, counts.tolist(), strict=True)]


def _forbid_stops(
    logits: torch.Tensor, batch: StepBatch, rows: np.ndarray, first_position: np.ndarray, requests: RequestTable
) -> None:
    """Hide the stop tokens at output positions below `min_tokens`. logits: `[sum(num_draft + 1), vocab]`, changed."""
    flat = 0
    for row, position in zip(rows.tolist(), first_position.tolist(), strict=True):
        record = requests.records[batch.request_ids[row]]
        size = int(batch.num_draft[row]) + 1
        below = record.num_prompt_tokens + record.sampling.min_tokens - position
        if below > 0 and len(record.stop_ids):
            logits[flat : flat + min(below, size)].index_fill_(1, record.stop_ids, float("-inf"))
        flat += size
