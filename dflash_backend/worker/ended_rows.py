"""Rows whose answers end with the step propose no drafts, where the host has the step's tokens before it drafts.

That is on a CPU. There a step's tokens wait for the drafts behind them, and of a short answer's steps the last one is a
good part. Whether a row drafts changes no token (LOSSLESS); the core ends the request by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dflash_backend.core.ending import EndRule
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.worker.state import RequestStates, StateTensors
from dflash_backend.worker.step_tensors import Accepted


class DraftingRow(NamedTuple):
    """A row that yields tokens and drafts: its number in the step, where its request's answer begins, and what ends
    it."""

    number: int
    num_prompt_tokens: int
    rule: EndRule


def drafting_rows(rows: Sequence[ScheduledRequest], requests: RequestStates) -> list[DraftingRow]:
    """Those of a step's rows. What a row yields that does not sample has no meaning, so it has no place here."""
    found = []
    for number, row in enumerate(rows):
        if row.sample and row.num_next_draft:
            record = requests.records[row.request_id]
            found.append(DraftingRow(number, record.num_prompt_tokens, record.ending))
    return found


def ended_rows(
    req_idx: torch.Tensor, accepted: Accepted, state: StateTensors, rows: Sequence[DraftingRow]
) -> list[int]:
    """The numbers of those of `rows` whose answers end with the tokens that they yield; after `accept`, on the host.
    req_idx: int32 `[R]`, the index of each row's request."""
    if not rows:
        return []
    counts, tokens, indices = accepted.count.tolist(), accepted.tokens.tolist(), req_idx.tolist()
    computed = state.computed.numpy()
    found = []
    for number, num_prompt_tokens, rule in rows:
        num_new = counts[number] + 1
        num_before = computed.item(indices[number]) + 1 - num_new - num_prompt_tokens
        if rule.apply(tokens[number][:num_new], num_before)[1] is not None:
            found.append(number)
    return found
