"""What one request does in one step, and the most it can ever need: arithmetic on that request alone.

Nothing here looks at other requests, at the pool or at the queue. Where a request's draft blocks start decides what a
sampled request draws, so k must follow from the request itself for its output to be the same whatever else runs. Called
by the scheduler for every row and by admission.
"""

from __future__ import annotations

import msgspec

from dflash_backend.core.plan import EngineLimits
from dflash_backend.core.request import Request


class RowShape(msgspec.Struct, frozen=True, gc=False):
    """A row before it has blocks; the counts are those of `ScheduledRow`.

    `num_positions` is what invariant RESERVE asks for: the request's blocks must cover every position below it.
    """

    num_new: int
    num_draft: int
    sample: bool
    num_next_draft: int
    num_positions: int


def shape_decode(request: Request, limits: EngineLimits) -> RowShape:
    """The row of a request whose last token alone is not computed: that token and all of its drafts.

    Trimming drafts would make a sampled output depend on the other rows.
    """
    num_draft = request.pending_draft
    end = request.num_computed + 1 + num_draft
    k = next_draft_length(request, end + 1, limits)
    return RowShape(1, num_draft, True, k, end + limits.lookahead(k))


def shape_prefill(request: Request, limits: EngineLimits, budget: int) -> RowShape:
    """The next chunk of a request's prefill, of `budget` tokens at most and one at least."""
    num_tokens = request.num_tokens
    num_new = min(request.prefill_end - request.num_computed, budget)
    end = request.num_computed + num_new
    # A chunk is judged by what its prefill will leave, so that all chunks of a prompt agree. Drafts that were pending
    # when the request was preempted are proposed again from the same anchor.
    k = request.pending_draft or next_draft_length(request, num_tokens + 1, limits)
    finishes = end == request.prefill_end
    return RowShape(num_new, 0, end == num_tokens, k if finishes else 0, end + limits.lookahead(k))


def next_draft_length(request: Request, num_tokens: int, limits: EngineLimits) -> int:
    """k for the drafts after a step that leaves the request with at most `num_tokens` tokens: all of k, or none.

    Invariant WINDOW: `num_tokens + k + 1` must fit what the drafter can address; the 1 is the slot of the anchor that
    follows when every draft stands. It must fit `max_model_len` as well, past which no verified position may lie. A
    request that the step is sure to end drafts no more; surplus drafts before that are dropped at `max_tokens`.
    """
    k = request.num_speculative_tokens
    if request.num_output_tokens + 1 >= request.sampling.max_tokens:
        return 0
    return k if _in_window(k, num_tokens, limits) else 0


def peak_positions(request: Request, limits: EngineLimits) -> int:
    """The most positions that the request's blocks ever have to cover, if it runs to its last token. Constant.

    When the pool covers this, a request that runs alone never lacks a block, and so the oldest request always finishes.
    """
    longest = min(request.num_prompt_tokens + request.sampling.max_tokens, limits.max_model_len)
    target = longest - 1  # the last token of all is never run
    k = request.num_speculative_tokens
    if k == 0 or request.sampling.max_tokens == 1 or not _in_window(k, request.num_prompt_tokens + 1, limits):
        return target  # it never drafts
    # The latest verification that is followed by drafts starts from an anchor with two tokens still to come.
    reach = k + limits.lookahead(k)
    by_tokens = request.num_prompt_tokens + request.sampling.max_tokens - 2 + reach
    by_window = limits.max_drafting_len + limits.lookahead(k) - k - 2
    return max(target, min(by_tokens, by_window))


def _in_window(k: int, num_tokens: int, limits: EngineLimits) -> bool:
    return num_tokens + k + 1 <= limits.max_drafting_len
