"""Log-probabilities of tokens, their ranks, and the most likely tokens of a row of logits."""

from __future__ import annotations

import torch


def ranked_logprobs_reference(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """For `logits` `[n, vocab]` (any floating-point dtype, any device) and tokens `ids`, int64 `[n, m]`: their
    log-probabilities, `[n, m]`; their ranks, the number of tokens that are at least as likely, `[n, m]`; and the
    log-probabilities and ids of the `num_top` most likely tokens, at most all, `[n, top]` each, the best first, the
    lowest id among equals: which ones a request gets does not depend on how many its neighbours ask for. Side by side
    for one copy to the host, float64, which holds ids and float32 values exactly: `[n, 2 * (m + top)]`. All are NaN
    but ranks and ids where a logit of the row is NaN, or all are -inf."""
    values = logits.float()
    logprobs, own = values.log_softmax(dim=-1), values.gather(1, ids)
    ranks = [(values >= own[:, column, None]).sum(dim=1, keepdim=True) for column in range(ids.shape[1])]
    top_ids = most_likely(values, min(num_top, logits.shape[1]))
    parts = [logprobs.gather(1, ids), *ranks, logprobs.gather(1, top_ids), top_ids]
    return torch.cat([part.double() for part in parts], dim=1)


def most_likely(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the largest `scores` (float32 `[n, vocab]`) of each row, the first among equals: int64
    `[n, count]`. `topk` gives equals in an order that depends on `count`."""
    bits = scores.view(torch.int32).long()
    # As integers in the order of the numbers; below each, the column, the lowest of which is the largest key.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    columns = torch.arange(scores.shape[1], device=scores.device)
    return (ordered * 2**32 - columns).topk(count, dim=1).indices
