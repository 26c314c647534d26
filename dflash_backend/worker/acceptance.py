"""The accept phase for rows of one kind (greedy or sampled): logits, verification, new tokens. Called by the runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dflash_backend.messages import TokenLogprobs
from dflash_backend.models.interface import TargetModel
from dflash_backend.sampling.filtering import probabilities
from dflash_backend.sampling.verify import VerifyLayout, verify_greedy, verify_sampled
from dflash_backend.worker.batch import StepBatch, spans
from dflash_backend.worker.logits import JudgedRows, adjust, token_logprobs
from dflash_backend.worker.request_table import RequestTable


@dataclass(frozen=True)
class AcceptedRows:
    """What the accept phase decided for n rows, on the host.

    num_accepted: int64 `[n]`, the drafts that stand. tokens: each row's new tokens, those drafts and the token that
    follows. logprobs: an entry for each new token, or None for rows that did not ask.
    """

    num_accepted: np.ndarray
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]


def accept_rows(
    batch: StepBatch,
    rows: np.ndarray,
    hidden: torch.Tensor,
    target: TargetModel,
    requests: RequestTable,
    greedy: bool,
    greedy_drafts: bool,
) -> AcceptedRows:
    """Verify the drafts of the batch's `rows` (int64 `[n]`) and write the token after them into the request table.

    hidden: `[num_tokens, hidden_size]`, the target's output for the whole step.
    """
    device = hidden.device
    num_draft = batch.num_draft[rows]
    last_known = batch.first_token[rows] + batch.num_new[rows] - 1
    _, flat = spans(last_known, num_draft + 1)
    raw_logits = target.logits(hidden[torch.from_numpy(flat).to(device)])
    first_position = batch.start[rows] + batch.num_new[rows]
    judged = JudgedRows([batch.request_ids[i] for i in rows.tolist()], batch.table[rows], first_position, num_draft)
    logits = adjust(raw_logits, judged, requests)

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
    rows_of_tokens = requests.tokens[table[:, None], positions[:, None] + columns].tolist()
    counts = accepted.cpu().numpy()
    new_tokens = [tokens[: count + 1] for tokens, count in zip(rows_of_tokens, counts.tolist(), strict=True)]
    return AcceptedRows(counts, new_tokens, token_logprobs(raw_logits, judged, requests, new_tokens))
