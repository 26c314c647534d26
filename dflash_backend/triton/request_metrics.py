"""What the metrics count of each request."""

from __future__ import annotations

from dflash_backend.messages import RequestStats
from dflash_backend.text.output import RequestState
from dflash_backend.triton.metrics import Metrics


def count_tokens(metrics: Metrics, state: RequestState, new_tokens: int, first: bool) -> None:
    """Count a response: its new tokens, and with the `first` one of a request its prompt.

    Only what a client is sent counts: a request that is refused or cancelled before its first response has no token.
    """
    if first:
        metrics.count("dflash:prompt_tokens_total", len(state.parsed.prompt_token_ids))
    metrics.count("dflash:generation_tokens_total", new_tokens)


def count_wait(metrics: Metrics, stats: RequestStats) -> None:
    """Observe how long a request waited for its first step, from the first of its stats. Once a request."""
    metrics.observe("dflash:request_queue_time_seconds", stats.queue_time_s)


def count_first_token(metrics: Metrics, state: RequestState, first_token_at: float) -> None:
    """Observe the time to the first token of a request, which came at `first_token_at`, in seconds of
    `time.monotonic`. Once a request."""
    metrics.observe("dflash:time_to_first_token_seconds", first_token_at - state.arrived_at)


def count_finished(metrics: Metrics, state: RequestState, now: float) -> None:
    """Count a request that has its last tokens at `now`, in seconds of `time.monotonic`.

    The tokens of each completion are observed; all else is observed once a request. The two functions above observe its
    wait and its first token, which a request has that does not come to its end.
    """
    for completion in state.completions:
        metrics.count("dflash:request_success_total", 1, str(completion.finish_reason))
        metrics.observe("dflash:request_generation_tokens", completion.num_tokens)
    metrics.observe("dflash:request_prompt_tokens", len(state.parsed.prompt_token_ids))
    metrics.observe("dflash:request_params_n", len(state.completions))
    metrics.observe("dflash:e2e_request_latency_seconds", now - state.arrived_at)
    if state.first_token_at is None:
        return
    longest = max(completion.num_tokens for completion in state.completions)
    if longest > 1:
        mean_s = (now - state.first_token_at) / (longest - 1)
        metrics.observe("dflash:request_time_per_output_token_seconds", mean_s)
