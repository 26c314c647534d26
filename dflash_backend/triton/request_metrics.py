"""What the metrics count of each request. Used by `triton.service`."""

from __future__ import annotations

from dflash_backend.triton.flight import Flight
from dflash_backend.triton.metrics import Metrics


def count_tokens(metrics: Metrics, flight: Flight, new_tokens: int, first: bool) -> None:
    """Count a response: its new tokens, and with the `first` one of a request its prompt.

    What a client is told of is what counts: a request that is refused or cancelled before that has got no token.
    """
    if first:
        metrics.count("dflash:prompt_tokens_total", len(flight.parsed.prompt_token_ids))
    metrics.count("dflash:generation_tokens_total", new_tokens)


def count_finished(metrics: Metrics, flight: Flight, now: float) -> None:
    """Count a request whose last tokens are there at `now`, in seconds of the clock of its other times.

    Each is observed once a request, also when it has several completions, but for what each of these yielded.
    """
    for completion in flight.completions:
        metrics.count("dflash:request_success_total", 1, str(completion.finish_reason))
        metrics.observe("dflash:request_generation_tokens", completion.num_tokens)
    metrics.observe("dflash:request_prompt_tokens", len(flight.parsed.prompt_token_ids))
    metrics.observe("dflash:request_params_n", len(flight.completions))
    metrics.observe("dflash:e2e_request_latency_seconds", now - flight.submitted_at)
    metrics.observe("dflash:request_queue_time_seconds", flight.queue_time_s)
    if flight.first_token_at is None:
        return
    metrics.observe("dflash:time_to_first_token_seconds", flight.first_token_at - flight.submitted_at)
    longest = max(completion.num_tokens for completion in flight.completions)
    if longest > 1:
        mean_s = (now - flight.first_token_at) / (longest - 1)
        metrics.observe("dflash:request_time_per_output_token_seconds", mean_s)
