"""The metrics page follows what was served."""

from __future__ import annotations

from tests.server.conftest import eventually

COUNTED = "dflash:generation_tokens_total"


def test_counters_grow_by_what_a_request_did(grpc_client, metric):
    before = {name: metric(name) for name in (COUNTED, "dflash:prompt_tokens_total")}
    latencies = metric("dflash:e2e_request_latency_seconds_count")
    result = grpc_client.generate("What is 5 + 6?", temperature=0, max_tokens=12, ignore_eos=True)
    eventually(lambda: metric(COUNTED) == before[COUNTED] + 12, "generated tokens are counted")
    assert metric("dflash:prompt_tokens_total") == before["dflash:prompt_tokens_total"] + result.num_input_tokens
    assert metric("dflash:e2e_request_latency_seconds_count") == latencies + 1
    assert metric("dflash:request_success_total", finished_reason="length") >= 1
    assert metric("dflash:spec_decode_num_draft_tokens_total") > 0
