"""What one request does in one step, and the most it can ever need: arithmetic on that request alone.

Nothing here looks at other requests, at the pool or at the queue. How many tokens a row drafts is `draft_length`, which
the scheduler sets before it makes rows, or none where they do not fit or cannot be of use. The scheduler makes hundreds
of rows a step, so short steps are written out rather than called.
"""

from __future__ import annotations

import sys

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.request import Request
from dflash_backend.core.scheduler_config import SchedulerConfig


def decode_row(request: Request, config: SchedulerConfig) -> ScheduledRequest:
    """The row of a request whose last token alone is not computed: that token and all of its drafts."""
    start, num_draft = request.num_computed, request.pending_draft
    end = start + 1 + num_draft
    k = next_draft_length(request, start + 1, num_draft, config, request.draft_length)
    num_positions = end + config.lookahead(k)
    return ScheduledRequest(request.request_id, start, 1, num_draft, True, k, [], 0, num_positions)


def prefill_row(
    request: Request, start: int, config: SchedulerConfig, budget: int, draft_length: int
) -> ScheduledRequest:
    """The next chunk of a request's prefill, from position `start` on, of `budget` tokens at most and one at least. It
    ends where the recurrent state is to be copied."""
    num_tokens = request.num_tokens
    num_new = min(request.prefill_end - start, budget)
    for border in request.snapshot_borders:
        if start < border < start + num_new:
            num_new = border - start
            break
    end = start + num_new
    # k follows from the tokens that the whole prefill leaves, so that all chunks of a prompt agree. Drafts that were
    # pending when the request was preempted are proposed again from the same anchor.
    k = request.pending_draft or next_draft_length(request, num_tokens, 0, config, draft_length)
    finishes = end == request.prefill_end
    num_positions = end + config.lookahead(k)
    return ScheduledRequest(
        request.request_id, start, num_new, 0, end == num_tokens, k if finishes else 0, [], 0, num_positions
    )


def prefills_next(request: Request) -> bool:
    """Whether the request's next row is a prefill chunk, also when a row is in flight: more than its last token is not
    computed."""
    row = request.row_in_flight
    if row is None:
        return request.num_tokens - request.num_computed > 1
    return not row.sample and request.num_tokens - request.num_computed - row.num_new > 1


def next_start(request: Request) -> int:
    """Where the next chunk of a running request in prefill starts."""
    row = request.row_in_flight
    return request.num_computed + (0 if row is None else row.num_new)


def decode_tokens(request: Request) -> int:
    """Tokens of the request's next row if that decodes; 0 while it is in prefill."""
    row = request.row_in_flight
    if row is None:
        return 1 + request.pending_draft if len(request.token_ids) - request.num_computed == 1 else 0
    if prefills_next(request):
        return 0
    return 1 + (row.num_next_draft if row.sample else request.pending_draft)


def decode_row_ahead(request: Request, row: ScheduledRequest, config: SchedulerConfig) -> ScheduledRequest | None:
    """The decode row behind `row`, which is in flight; None when it must wait for the result, or is sure not to come.

    Only outcomes count after which the request goes on. Every number is the largest over them, and k must be the same
    for all: it falls with the number of tokens, so the lowest and the highest outcome tell.
    """
    if not row.sample:  # a prefill that stopped before the last token, which is known
        fewest = most = request.num_tokens
        num_draft = request.pending_draft
    else:
        longest = min(request.num_prompt_tokens + request.sampling.max_tokens, config.max_model_len) - 1
        fewest = request.num_tokens + 1
        if fewest > longest:
            return None
        most = min(fewest + row.num_draft, longest)
        num_draft = row.num_next_draft
    # A request with one token left ends in this row, so drafting after it cannot change its output.
    most_drafting = max(fewest, min(most, request.num_prompt_tokens + request.sampling.max_tokens - 2))
    k = next_draft_length(request, most_drafting, num_draft, config, request.draft_length)
    if k == 0 and next_draft_length(request, fewest, num_draft, config, request.draft_length) > 0:
        return None
    num_positions = num_draft + max(most, most_drafting + config.lookahead(k))
    return ScheduledRequest(request.request_id, most - 1, 1, num_draft, True, k, [], row.num_draft, num_positions)


def next_draft_length(request: Request, num_tokens: int, num_draft: int, config: SchedulerConfig, k: int) -> int:
    """The drafts after a step that begins with `num_tokens` tokens and verifies `num_draft`: `k` of them, or none.

    When every draft is accepted the step leaves `num_tokens + num_draft + 1` tokens, of which the last is the anchor;
    the next block must fit behind it (WINDOW). A request that the step is sure to end drafts no more; surplus drafts
    before that are dropped at `max_tokens`.
    """
    if num_tokens - request.num_prompt_tokens + 1 >= request.sampling.max_tokens:
        return 0
    return k if config.drafts_fit(num_tokens + num_draft + 1, k) else 0


def positions_to_start(request: Request, config: SchedulerConfig) -> int:
    """Positions that must be free for a request to start: its whole prefill, and the decode row after it, with as many
    drafts as it may propose: where k do not fit, fewer may."""
    k = request.num_speculative_tokens
    if config.adaptive_speculation:
        k = min(k, max(0, config.max_drafting_len - request.num_tokens - 1))
    whole = prefill_row(request, 0, config, sys.maxsize, k)
    return min(whole.num_positions + 1 + whole.num_next_draft, peak_positions(request, config))


def promised_blocks(request: Request) -> int:
    """Blocks that a running request will still take before it decodes."""
    return max(0, request.num_blocks_to_decode - len(request.block_ids)) if prefills_next(request) else 0


def peak_positions(request: Request, config: SchedulerConfig) -> int:
    """The most positions that the request's blocks ever have to cover, if it runs to its last token. Constant.

    When the pool covers this, a request that runs alone never lacks a block, and so the oldest request always finishes.
    """
    longest = min(request.num_prompt_tokens + request.sampling.max_tokens, config.max_model_len)
    target = longest - 1  # the last token of all is never run
    k = request.num_speculative_tokens
    fewest = min(k, 1) if config.adaptive_speculation else k
    if next_draft_length(request, request.num_prompt_tokens, 0, config, fewest) == 0:
        return target  # it never drafts
    # The latest verification that is followed by drafts starts from an anchor with two tokens still to come.
    reach = k + config.lookahead(k)
    by_tokens = request.num_prompt_tokens + request.sampling.max_tokens - 2 + reach
    by_window = config.max_drafting_len + config.lookahead(k) - k - 1
    # The latest of all starts from the last token but one. It reaches further where less than k + 1 is reserved.
    verifying = min(request.num_prompt_tokens + request.sampling.max_tokens - 1 + k, config.max_drafting_len)
    return max(target, verifying, min(by_tokens, by_window))
