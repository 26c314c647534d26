"""Prompt lookup through Triton: the text is that of the server with a drafter, and the counts say what it drafted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from load_tests.server_state import MetricsPage
from tests.server.conftest import new_server
from tests.support.waiting import eventually

PROMPT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
LOG: list[str] = []


@pytest.fixture(scope="module")
def ngram_server() -> Iterator[TritonServer]:
    settings = {"draft_model": "ngram", "num_speculative_tokens": "4", "prompt_lookup_max": "3"}
    with new_server(settings, on_log=lambda line: LOG.append(line.text)) as running:
        yield running


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 5}], ids=str)
def test_the_text_is_that_of_a_server_with_a_drafter(
    ngram_server: TritonServer, grpc_client: DFlashClient, sampling: dict[str, float]
) -> None:
    expected = grpc_client.generate(PROMPT, max_tokens=64, **sampling)
    with DFlashClient(ngram_server.grpc_url, "grpc", timeout_s=120) as client:
        found = client.generate(PROMPT, max_tokens=64, **sampling)
    assert found.text == expected.text
    assert found.num_output_tokens == expected.num_output_tokens
    stats = found.spec_stats
    assert stats["num_draft_tokens"] == 4 * stats["num_drafts"] > 0
    assert stats["num_accepted_tokens"] > 0


def test_log_and_metrics_name_it(ngram_server: TritonServer) -> None:
    log = "\n".join(LOG)
    assert "drafter: n-grams: n-grams of 2 to 3 tokens, the longest that matches" in log
    assert "prompt lookup of n-grams of 2 to 3 tokens (k = 4)" in log
    assert "served without speculation" not in log
    with DFlashClient(ngram_server.grpc_url, "grpc", timeout_s=120) as client:
        client.generate(PROMPT, max_tokens=16, temperature=0)
    name = "dflash:spec_decode_num_draft_tokens_total"
    eventually(lambda: MetricsPage.read(ngram_server.metrics_url).value(name) > 0, "drafts are counted")
