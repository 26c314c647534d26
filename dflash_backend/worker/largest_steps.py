"""The steps that take the most memory of those that the scheduler can make within given config.

`worker.memory` runs them before there is a KV cache. So every row names block 0 over and over, and what its tokens are
does not matter. The requests are sampled ones, whose distributions take more than a greedy request's logits.
"""

from __future__ import annotations

from dflash_backend.core.plan import NewRequest, ScheduledRequest, StepPlan
from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import SamplingParams

# Cuts the tail, which sorts the distributions where there are no kernels.
SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)


def prefill_step(config: SchedulerConfig) -> StepPlan:
    """The last chunks of as many prompts as there may be requests, with as many tokens as a step may have: the first is
    the longest request, then come more while there are tokens left for them, each with one at least."""
    longest = config.max_model_len - 1
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    left = config.max_num_batched_tokens
    rows = []
    for index in range(num_rows):
        num_new = min(left - (num_rows - 1 - index), longest)
        left -= num_new
        rows.append(_row(config, f"prefill-{index}", longest - num_new if index == 0 else 0, num_new, 0))
    return StepPlan(0, rows, [_request(row) for row in rows])


def decode_step(config: SchedulerConfig, before: StepPlan) -> StepPlan:
    """The step after `before`, whose requests are forgotten: a decode row with all its drafts for each request there
    may be, the first one as long as drafts are made."""
    k = config.num_speculative_tokens
    # The row's own 1 + k tokens, the anchor that follows, and its k masks (WINDOW).
    if config.max_drafting_len < 2 * k + 2:
        k = 0
    longest = config.max_drafting_len - 2 * k - 2 if k else config.max_model_len - 2
    num_rows = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // (1 + k)))
    starts = [longest] + [min(1, longest)] * (num_rows - 1)
    step_id = before.step_id + 1
    rows = [_row(config, f"decode-{step_id}-{index}", start, 1, k) for index, start in enumerate(starts)]
    return StepPlan(step_id, rows, [_request(row) for row in rows], [row.request_id for row in before.rows])


def _row(config: SchedulerConfig, request_id: str, start: int, num_new: int, num_draft: int) -> ScheduledRequest:
    """A row that samples, and drafts where that fits (WINDOW)."""
    k = config.num_speculative_tokens
    end = start + num_new + num_draft
    num_next = k if k and config.drafts_fit(end + 1, k) else 0
    num_blocks = config.cache_group.blocks_for(end + config.lookahead(num_next))
    return ScheduledRequest(request_id, start, num_new, num_draft, True, num_next, [0] * num_blocks)


def _request(row: ScheduledRequest) -> NewRequest:
    """The request of a row, as it is when the row's drafts are not verified yet."""
    known = row.num_computed + row.num_new
    return NewRequest(row.request_id, [0] * known, known, SAMPLING, (), 0)
