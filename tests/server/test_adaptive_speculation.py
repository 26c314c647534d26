"""A server that drafts as many tokens as pay."""

from __future__ import annotations

from functools import partial

from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from load_tests.server_state import MetricsPage
from tests.server.conftest import new_server
from tests.support.waiting import eventually

PROMPTS = [f"What is {a} + {b}?" for a, b in [(3, 4), (12, 9), (25, 31), (7, 70)]]
EXPECTED = "expected_tokens_per_pos"
ASKED = {"max_tokens": 48, "temperature": 0.8, "seed": 4}


def says_what_was_drafted(server: TritonServer, adaptive: bool) -> bool:
    """Whether the page has all drafts, and what was expected of them where `adaptive`."""
    value = MetricsPage.read(server.metrics_url).value
    drafted, expected = (value(f"dflash:spec_decode_num_{name}_total") for name in ("draft_tokens", EXPECTED))
    steps = value("dflash:spec_decode_num_steps_total")
    if not adaptive:
        return drafted > 0 and not steps and not expected
    return steps > 0 and 0 < expected < drafted == value("dflash:spec_decode_num_draft_tokens_per_pos_total")


def test_texts_are_those_of_a_server_that_always_drafts_and_metrics_say_what_was_expected(server: TritonServer) -> None:
    texts = []
    with new_server({"adaptive_speculation": "true"}) as other:
        for one, adaptive in ((other, True), (server, False)):
            with DFlashClient(one.grpc_url) as client:
                texts.append([client.generate(prompt, **ASKED).text for prompt in PROMPTS for _ in range(3)])
            # The counters of one step come onto the page one after the other.
            eventually(partial(says_what_was_drafted, one, adaptive), "all drafts are counted")
    assert texts[0] == texts[1]
