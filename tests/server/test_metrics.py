"""The metrics page follows what was served."""

from __future__ import annotations

import httpx
import pytest

from tests.server.conftest import settle
from tests.support.waiting import eventually

pytestmark = pytest.mark.smoke

COUNTED = "dflash:generation_tokens_total"


@pytest.fixture(autouse=True)
def settled(metric):
    settle(metric)


def test_counters_grow_by_what_a_request_did(grpc_client, metric):
    def page() -> list[float]:
        lengths = metric("dflash:request_success_total", finished_reason="length")
        latencies = metric("dflash:e2e_request_latency_seconds_count")
        return [metric(COUNTED), metric("dflash:prompt_tokens_total"), latencies, lengths]

    drafts = "dflash:spec_decode_num_draft_tokens_total"
    before, drafted = page(), metric(drafts)
    result = grpc_client.generate("What is 5 + 6?", temperature=0, max_tokens=12, ignore_eos=True)
    after = [count + more for count, more in zip(before, (12, result.num_input_tokens, 1, 1), strict=True)]
    eventually(lambda: page() == after, "the request is counted")
    eventually(lambda: metric(drafts) > drafted, "its drafts are counted")


def test_a_request_is_on_the_page_when_its_client_has_the_answer(grpc_client, http_client, metric):
    def page() -> list[float]:
        return [metric(COUNTED), metric("dflash:e2e_request_latency_seconds_count")]

    for client in (grpc_client, http_client):
        for _ in range(3):
            before = page()
            client.generate("What is 5 + 6?", temperature=0, max_tokens=6, ignore_eos=True)
            # At once, or 50 ms later where bringing the page up to date takes too much of the thread that answers.
            after = [before[0] + 6, before[1] + 1]
            eventually(lambda after=after: page() == after, "the request is on the page", within_s=0.5)


def test_a_histogram_on_the_page_has_buckets_that_add_up(grpc_client, metric):
    name = "dflash:inter_token_latency_seconds"
    before = metric(f"{name}_count", version="1")
    grpc_client.generate("What is 5 + 6?", temperature=0, max_tokens=9, ignore_eos=True)
    eventually(lambda: metric(f"{name}_count", version="1") == before + 8, "8 intervals are counted")
    eventually(lambda: metric(f"{name}_bucket", le="+Inf") == before + 8, "8 intervals are in the last bucket")
    assert metric(f"{name}_bucket", le="0.0005") <= metric(f"{name}_bucket", le="1") <= before + 8


def test_the_largest_bucket_of_a_small_histogram_comes_last_on_the_page(server):
    """The tests of Triton's vLLM backend take the last line of a name for all observations."""
    page = httpx.get(f"http://{server.metrics_url}/metrics", timeout=10, trust_env=False, verify=False).text
    for name in ("inter_token_latency_seconds", "request_params_n"):
        buckets = [line for line in page.splitlines() if line.startswith(f"dflash:{name}_bucket{{")]
        assert 'le="+Inf"' in buckets[-1]


def test_each_refusal_is_counted_once_by_its_status(post, metric):
    name = "dflash:request_errors_total"
    before = metric(name, status="INVALID_ARGUMENT")
    for body in ({}, {"text_input": "a", "n": 0}, {"text_input": "a", "n": 9}):
        assert post(**body).status_code == 400
    eventually(lambda: metric(name, status="INVALID_ARGUMENT") == before + 3, "refusals are counted")


def test_several_completions_count_their_prompt_once_and_their_tokens_each(post, metric, grpc_client):
    names = (COUNTED, "dflash:prompt_tokens_total", "dflash:e2e_request_latency_seconds_count")
    before = [metric(name) for name in names]
    assert post(text_input="What is 5 + 6?", n=3, max_tokens=5, ignore_eos=True).status_code == 200
    prompt_tokens = grpc_client.generate("What is 5 + 6?", max_tokens=1).num_input_tokens
    after = [before[0] + 15 + 1, before[1] + 2 * prompt_tokens, before[2] + 2]
    eventually(lambda: [metric(name) for name in names] == after, "both requests are counted")


def test_the_time_of_steps_is_there_by_phase(grpc_client, metric):
    phases = ("verify", "accept", "inject", "draft")
    before = {phase: metric("dflash:step_seconds_count", phase=phase) for phase in phases}
    grpc_client.generate("What is 5 + 6?", temperature=0, max_tokens=12)
    for phase in phases:
        eventually(
            lambda phase=phase: metric("dflash:step_seconds_count", phase=phase) > before[phase],
            f"the phase {phase} is observed",
        )
