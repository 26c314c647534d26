"""Tenants, priorities and time-outs over the wire, on a server of small rows and steps."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dflash_client import DFlashClient
from tests.server.raw_grpc import infer, inputs_of
from tests.support.scale import by_night
from tests.support.waiting import eventually

FLOOD = 14
LONG = "A farmer has 12 cows and buys 7 more of them at the market. " * 6
# Eight rows decode at a time, and these answers keep them for a while.
FLOOD_SAMPLING = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("tenant", ["other", by_night(None)])
def test_a_tenant_is_answered_while_anothers_flood_has_all_rows(grpc_client: DFlashClient, metric, tenant) -> None:
    before = metric("dflash:num_preemptions_total")
    with ThreadPoolExecutor(FLOOD) as pool:
        flood: list[Future] = [
            pool.submit(
                grpc_client.generate, f"{index}. {LONG}", tenant="flood", cache_salt=f"{index}", **FLOOD_SAMPLING
            )
            for index in range(FLOOD)
        ]
        eventually(lambda: metric("dflash:num_requests_running") == 8, "the flood has every row")
        result = grpc_client.generate("What is 3 + 4?", max_tokens=4, ignore_eos=True, temperature=0, tenant=tenant)
        assert result.num_output_tokens == 4
        assert sum(not one.done() for one in flood) > 0, "before the flood is over"
        texts = {one.result().text for one in flood}
    assert len(texts) > 1
    eventually(lambda: metric("dflash:num_preemptions_total") > before, "a row was made free")


def test_a_timeout_ends_a_request_with_what_it_has(post) -> None:
    answer = post(
        text_input="Hello", max_tokens=900, ignore_eos=True, timeout=300_000, return_finish_reason=True
    ).json()
    assert answer["finish_reason"] == "abort"
    sampling = json.dumps({"max_tokens": 900, "ignore_eos": True, "timeout": 300_000})
    answer = post(text_input="Hello", sampling_parameters=sampling, return_finish_reason=True).json()
    assert answer["finish_reason"] == "abort"


def test_the_timeout_of_tritons_own_protocol_ends_a_request_too(server) -> None:
    """Triton does not leave it among the request's parameters."""
    inputs = inputs_of(text_input="Hello", stream=True, return_finish_reason=True)
    sampling = {"max_tokens": "900", "ignore_eos": "true"}
    results, error = infer(server.grpc_url, inputs, sampling, timeout=300_000)
    assert error is None
    assert results[-1].as_numpy("finish_reason").tolist() == [b"abort"]


@pytest.mark.parametrize(
    ("name", "value"), [("priority", -1), ("priority", "high"), ("timeout", -1), ("timeout", 0.5), ("tenant", "a b")]
)
def test_a_bad_priority_timeout_or_tenant_is_refused_by_name(post, name: str, value: object) -> None:
    response = post(text_input="Hello", max_tokens=2, **{name: value})
    assert response.status_code == 400
    assert f"INVALID_ARGUMENT: sampling parameter '{name}' has the value" in response.json()["error"]
