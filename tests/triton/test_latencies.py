"""The latency metrics of requests."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from dflash_backend.messages import RequestStats, TokenDelta
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.output import AddedTokens, RequestState
from dflash_backend.triton.metrics import Metrics
from dflash_backend.triton.request_metrics import count_finished, count_first_token, count_wait
from tests.engine_client import toy_process
from tests.triton.serving import submit


class Clock:
    """Seconds that pass only with each delta."""

    SECONDS_PER_DELTA = 2.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("triton.running_requests", "text.output"):
            stand_in = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
            monkeypatch.setattr(f"dflash_backend.{module}.time", stand_in)
        add = RequestState.add

        def add_later(state: RequestState, delta: TokenDelta) -> AddedTokens:
            self.now += self.SECONDS_PER_DELTA
            return add(state, delta)

        monkeypatch.setattr(RequestState, "add", add_later)


def test_latencies_are_measured_between_the_events_that_they_are_named_after(service, triton, monkeypatch):
    """Five steps of three tokens: the first token two seconds after the arrival, the last one eight after that."""
    clock = Clock(monkeypatch)
    submit(service, "ab", max_tokens=15).all()
    assert clock.now == 1010.0
    service.close()
    assert triton.observed("dflash:time_to_first_token_seconds") == (1, 2.0)
    assert triton.observed("dflash:e2e_request_latency_seconds") == (1, 10.0)
    assert triton.observed("dflash:request_time_per_output_token_seconds") == (1, pytest.approx(8.0 / 14))
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.5)
    # Two tokens came with the first one, and four times three came together, two seconds after those before.
    assert triton.observed("dflash:inter_token_latency_seconds") == (14, pytest.approx(8.0))
    buckets = triton.buckets("dflash:inter_token_latency_seconds")
    assert [buckets[bound] for bound in ("0.0005", "0.5", "1", "+Inf")] == [2, 2, 14, 14]


def test_of_several_completions_the_first_to_run_ends_the_wait(service, triton):
    submit(service, "ab", max_tokens=6, sampling={"n": 3}).all()
    service.close()
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.5)
    assert triton.observed("dflash:time_to_first_token_seconds")[0] == 1


@pytest.mark.parametrize("sampling", [{}, {"n": 2}, {"stop": "never"}])
def test_a_cancelled_request_has_the_wait_and_the_first_token_that_its_client_saw(service, triton, sampling):
    """Clients that give up are those that waited the longest: without them a percentile looks best under overload."""
    sender = submit(service, [toy_process.SLOW, 7], max_tokens=400, stream=True, sampling=sampling)
    sender.next()
    sender.cancelled = True
    assert sender.all()[-1].error.code == "CANCELLED"
    service.close()
    assert triton.values["dflash:request_errors_total", "CANCELLED"] == 1
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.5)
    assert triton.observed("dflash:time_to_first_token_seconds")[0] == 1
    # As vLLM's: of answers that ended.
    assert triton.observed("dflash:e2e_request_latency_seconds")[0] == 0


def test_a_request_that_is_given_up_before_its_first_token_has_no_times(service, triton):
    (response,) = submit(service, [toy_process.GIVE_UP]).all()
    assert response.error.code == "INTERNAL"
    service.close()
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert triton.observed(f"dflash:{name}_seconds")[0] == 0


def test_deltas_that_are_joined_keep_how_long_the_request_waited():
    stats = RequestStats(1, 1, 0, SpecDecodingStats(), 0, 0.5)
    joined = TokenDelta.joined([TokenDelta("a", [1], None, stats), TokenDelta("a", [2])])
    assert (joined.token_ids, joined.stats) == ([1, 2], stats)


def test_of_completions_of_unlike_lengths_the_longest_has_the_time_of_a_token(triton):
    """It began with the first token and ended at the end: eight tokens later, here in 4 s."""
    metrics = Metrics(triton, "m", "m_0_0", triton.lines.append)
    completions = [
        SimpleNamespace(num_tokens=count, finish_reason=reason)
        for count, reason in ((1, "stop"), (9, "length"), (4, "stop"))
    ]
    parsed = SimpleNamespace(prompt_token_ids=[7] * 20)
    state = SimpleNamespace(completions=completions, parsed=parsed, arrived_at=100.0, first_token_at=101.5)
    count_wait(metrics, SimpleNamespace(queue_time_s=0.25))
    count_first_token(metrics, state, 101.5)
    count_finished(metrics, state, now=105.5)
    metrics.flush()
    assert triton.observed("dflash:request_time_per_output_token_seconds") == (1, 4.0 / 8)
    assert triton.observed("dflash:time_to_first_token_seconds") == (1, 1.5)
    assert triton.observed("dflash:e2e_request_latency_seconds") == (1, 5.5)
    assert triton.observed("dflash:request_queue_time_seconds") == (1, 0.25)
    assert triton.observed("dflash:request_generation_tokens") == (3, 1 + 9 + 4)
    assert triton.observed("dflash:request_prompt_tokens") == (1, 20)
    assert triton.observed("dflash:request_params_n") == (1, 3)
    ended = {key[1]: value for key, value in triton.values.items() if key[0] == "dflash:request_success_total"}
    assert (ended["stop"], ended["length"]) == (2, 1)
